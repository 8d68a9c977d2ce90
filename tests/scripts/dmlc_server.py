"""A parameter server in the roles of DMLC: workers push gradients to servers and pull weights.

The scheduler tells everyone where the servers are, and all leave when the last worker has.
"""

import os
import pickle
import random
import socket
import struct
import threading

ROLE = os.environ["DMLC_ROLE"]
ROOT = os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"])
SERVERS, WORKERS = int(os.environ["DMLC_NUM_SERVER"]), int(os.environ["DMLC_NUM_WORKER"])
DIM, STEPS = 4, 60


def send(channel, value):
    data = pickle.dumps(value)
    channel.sendall(struct.pack("!I", len(data)) + data)


def receive(channel):
    def exactly(count):
        data = b""
        while len(data) < count:
            part = channel.recv(count - len(data))
            if not part:
                raise EOFError("the other end is gone")
            data += part
        return data

    return pickle.loads(exactly(struct.unpack("!I", exactly(4))[0]))


def connect(where):
    while True:
        try:
            return socket.create_connection(where, timeout=60)
        except ConnectionRefusedError:
            continue


def scheduler():
    """Wait until all are there, tell them the addresses of the servers, wait until all leave."""
    with socket.create_server(ROOT) as listener:
        everybody = [listener.accept()[0] for _ in range(SERVERS + WORKERS)]
        said = [receive(channel) for channel in everybody]
        servers = [where for role, where in said if role == "server"]
        assert len(servers) == SERVERS
        for channel in everybody:
            send(channel, servers)
        for channel, (role, _) in zip(everybody, said, strict=True):
            if role == "worker":
                assert receive(channel) == "done"
        for channel in everybody:
            send(channel, "leave")
            channel.close()


def server():
    """Hold a slice of the weights; add what is pushed, give what is pulled."""
    listener = socket.create_server((os.environ["DMLC_NODE_HOST"], 0))
    weights, lock = {}, threading.Lock()

    def serve(channel):
        with channel:
            while True:
                what, keys, values = receive(channel)
                if what == "bye":
                    return
                with lock:
                    for key, value in zip(keys, values, strict=True):
                        weights[key] = weights.get(key, 0.0) + value
                    send(channel, [weights.get(key, 0.0) for key in keys])

    with connect(ROOT) as root:
        send(root, ("server", listener.getsockname()))
        receive(root)
        threads = []
        for _ in range(WORKERS):
            threads.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        assert receive(root) == "leave"
    listener.close()


def worker():
    """Train on samples of its own; each server holds the weights `key % SERVERS == its number`."""
    numbers = random.Random(int(os.environ["DMLC_TASK_ID"]))
    data = [[numbers.gauss(0, 1) for _ in range(DIM)] for _ in range(64)]
    losses = []
    with connect(ROOT) as root:
        send(root, ("worker", None))
        channels = [connect(where) for where in receive(root)]

        def exchange(gradient):
            pulled = [0.0] * DIM
            for number, channel in enumerate(channels):
                keys = list(range(number, DIM, SERVERS))
                send(channel, ("push", keys, [-0.05 * gradient[key] for key in keys]))
                for key, value in zip(keys, receive(channel), strict=True):
                    pulled[key] = value
            return pulled

        weights = exchange([0.0] * DIM)
        for _ in range(STEPS):
            errors = [
                sum(w * x for w, x in zip(weights, row, strict=True)) - sum(row) for row in data
            ]
            losses.append(sum(error * error for error in errors) / len(data))
            gradient = [
                2 * sum(e * row[key] for e, row in zip(errors, data, strict=True)) / len(data)
                for key in range(DIM)
            ]
            weights = exchange(gradient)
        for channel in channels:
            send(channel, ("bye", [], []))
            channel.close()
        send(root, "done")
        assert receive(root) == "leave"
    return losses


losses = {"scheduler": scheduler, "server": server, "worker": worker}[ROLE]()
told = f": loss {losses[0]:.6f} -> {losses[-1]:.6f}" if losses else ": served"
size = 1 + SERVERS + WORKERS
print(f"rank {os.environ['RANK']} of {size} on {socket.gethostname()}{told}", flush=True)

"""The switch of simulated nodes: real network namespaces and host names on one machine.

    python -P -m allranks.launcher.places.switch        (started by `SimulatedNodes`, never by hand)

This process makes a network of its own, which no other process of the machine sees: a bridge, and
for every node a network namespace with its own host name, joined to the bridge by a veth pair whose
two ends carry no more than the link is asked to (`tbf`) and as late as asked (`netem`). As root, or
as root of a user namespace that it makes. Nothing of it has a name outside, so all of it is gone
when its processes are, however they ended; they end with the process that started this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from allranks.job.place import NODE_ETH, Network, NodeLink
from allranks.launcher.processes.linux import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUTS,
    adopt_orphans,
    become_root_of_a_user_namespace,
    die_with_parent,
    show_instead,
    unshare,
)

MESSAGE_LIMIT = 1 << 17


class Impossible(RuntimeError):
    """This machine cannot simulate nodes; the message says what is missing."""


@dataclass
class SimulatedNode:
    """One node as the switch holds it: its agent, and its end of the link."""

    pid: int
    port: str
    network: str
    alive: bool = True


class Switch:
    """The network and its nodes. One request at a time comes over `control`."""

    def __init__(self, control: socket.socket, network: Network) -> None:
        self.control, self.network = control, network
        self.nodes: list[SimulatedNode] = []

    def build(self) -> None:
        """The bridge, and the socket at which the head of the job listens on it."""
        self._leave_the_machines_network()
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "switch", "type", "bridge")
        _ip("address", "add", f"{self.network.head}/{self.network.bits}", "dev", "switch")
        _ip("link", "set", "switch", "up")
        if self.network.link.delay_s:
            self._see_that_there_is_netem()
        listener = socket.create_server((self.network.head, 0), backlog=1024)
        socket.send_fds(self.control, [b'{"built": true}'], [listener.fileno()])
        listener.close()

    def _leave_the_machines_network(self) -> None:
        """Get the needed privileges, in a user namespace if this process has none."""
        try:
            unshare(CLONE_NEWNET)
        except PermissionError:
            try:
                become_root_of_a_user_namespace()
                unshare(CLONE_NEWNET)
            except OSError as error:
                raise Impossible(
                    "this user may make no network namespace, and no user namespace to make it in "
                    f"({error.strerror}): run as root, or allow user namespaces "
                    "(kernel.unprivileged_userns_clone, user.max_user_namespaces)"
                ) from error

    def _see_that_there_is_netem(self) -> None:
        try:
            _tc("qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        except Impossible as error:
            raise Impossible(
                f"delay= needs the kernel's module sch_netem, and it is not there ({error}): "
                "leave delay= out, or load it"
            ) from error
        _tc("qdisc", "del", "dev", "lo", "root")

    def serve(self) -> None:
        """Do as asked until the head closes its end."""
        adopt_orphans()
        while True:
            select.select([self.control], [], [])
            message, fds, _, _ = socket.recv_fds(self.control, MESSAGE_LIMIT, 4)
            if not message:
                return
            request = json.loads(message)
            try:
                answer = getattr(self, f"do_{request.pop('do')}")(fds=fds, **request)
            except (Impossible, OSError) as error:
                answer = {"problem": str(error)}
            self.control.send(json.dumps(answer or {}).encode())

    def do_start(self, fds: list[int], number: int) -> dict[str, Any]:
        """Create a node, with an agent on it; `fds` are its standard input and error."""
        port, (entry, go) = f"port{number}", os.pipe()
        ready, progress = os.pipe()
        pid = os.fork()
        if pid == 0:
            for fd in (go, ready):
                os.close(fd)
            _be_a_node(self.network, number, fds, entry, progress)
        for fd in (*fds, entry, progress):
            os.close(fd)
        try:
            if os.read(ready, 1) != b"n":
                raise Impossible(f"node {number} could not be made: its message stands above")
            _ip("link", "add", port, "type", "veth", "peer", "name", NODE_ETH, "netns", str(pid))
            _ip("link", "set", port, "master", "switch", "up")
            shape(port, self.network.link)
            os.write(go, b"g")
            network = os.readlink(f"/proc/{pid}/ns/net")
            if os.read(ready, 1) != b"r":
                raise Impossible(f"node {number} could not be joined: its message stands above")
        except Impossible:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        finally:
            os.close(go)
            os.close(ready)
        self.nodes.append(SimulatedNode(pid, port, network))
        return {"pid": pid}

    def do_cut(self, fds: list[int], number: int) -> None:
        """Drop all packets in the switch.

        The node's interface keeps its carrier. Without one Linux would forget the addresses of the
        other nodes, and ask for them again only once a second.
        """
        _bridge(self.nodes[number].port, "0")

    def do_mend(self, fds: list[int], number: int) -> None:
        _bridge(self.nodes[number].port, "3")

    def do_shape(self, fds: list[int], number: int, link: list[float]) -> None:
        """Change rate and delay, in both directions."""
        requested = NodeLink(*link)
        shape(self.nodes[number].port, requested)
        _in_node(self.nodes[number].pid, NODE_ETH, requested)

    def do_kill(self, fds: list[int], number: int) -> None:
        """Kill the node at once: its connections are not even closed."""
        node = self.nodes[number]
        if node.alive:
            node.alive = False
            with contextlib.suppress(Impossible):  # the node has ended, and its link with it
                _ip("link", "set", node.port, "down")
            for pid in _processes_in(node.network):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(node.pid, 0)


def shape(device: str, link: NodeLink, run: Any = None) -> None:
    """Limit a device to the link's rate, and delay each packet by the link's delay."""
    run = run or _tc
    with contextlib.suppress(Impossible):  # there may be nothing yet
        run("qdisc", "del", "dev", device, "root")
    if link.rate_bits:
        burst = max(1 << 17, int(link.rate_bits / 8 * 0.001))
        limit = max(1 << 20, int(link.rate_bits / 8 * 0.02))
        rate = f"{link.rate_bits:.0f}bit"
        tbf = ["tbf", "rate", rate, "burst", str(burst), "limit", str(limit)]
        run("qdisc", "add", "dev", device, "root", "handle", "1:", *tbf)
    if link.delay_s:
        where = ["parent", "1:1"] if link.rate_bits else ["root"]
        netem = ["netem", "delay", f"{link.delay_s * 1e6:.0f}us", "limit", "100000"]
        run("qdisc", "add", "dev", device, *where, *netem)


def _be_a_node(network: Network, number: int, fds: list[int], entry: int, ready: int) -> NoReturn:
    """In the child: enter a new network and hostname, then become the agent."""
    try:
        die_with_parent()
        unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS)
        socket.sethostname(network.name(number))
        with tempfile.NamedTemporaryFile("w", prefix="allranks-hosts-") as hosts:
            hosts.write(network.hosts_file())
            hosts.flush()
            show_instead(Path(hosts.name), Path("/etc/hosts"))
        _retransmit_as_most_hosts()
        os.write(ready, b"n")
        if os.read(entry, 1) != b"g":
            os._exit(1)
        _ip("link", "set", "lo", "up")
        _ip("address", "add", f"{network.address(number)}/{network.bits}", "dev", NODE_ETH)
        _ip("link", "set", NODE_ETH, "up")
        shape(NODE_ETH, network.link)
        os.write(ready, b"r")
        os.dup2(fds[0], 0)
        os.dup2(fds[1], 1)
        os.dup2(fds[1], 2)
        os.closerange(3, 256)
        os.execv(sys.executable, [sys.executable, "-P", "-m", "allranks.launcher.nodes.agent"])
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _retransmit_as_most_hosts() -> None:
    """Use Linux's default congestion control in this node, or Reno if cubic is not permitted."""
    for algorithm in ("cubic", "reno"):
        with contextlib.suppress(OSError):  # /proc may be read-only
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(algorithm)
            return


def _in_node(pid: int, device: str, link: NodeLink) -> None:
    """Shape a device inside of a node."""

    def run(*words: str) -> None:
        _run("nsenter", f"--net=/proc/{pid}/ns/net", "tc", *words)

    shape(device, link, run)


def _processes_in(network: str) -> list[int]:
    """All processes of a network namespace."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(folder / "ns/net") == network:
                pids.append(int(folder.name))
    return pids


def _ip(*words: str) -> None:
    _run("ip", *words)


def _bridge(port: str, state: str) -> None:
    """Set the state of a port: 0 is disabled, 3 is forwarding."""
    _run("bridge", "link", "set", "dev", port, "state", state)


def _tc(*words: str) -> None:
    _run("tc", *words)


def _run(*words: str) -> None:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env={"PATH": path, "LC_ALL": "C"}
        )
    except FileNotFoundError:
        raise Impossible(
            f"there is no command {words[0]!r} on this machine: install "
            + ("util-linux" if words[0] == "nsenter" else "iproute2")
        ) from None
    if done.returncode != 0:
        raise Impossible(f"`{' '.join(words)}` said: {done.stderr.strip() or done.returncode}")


def main() -> NoReturn:
    """Build, serve, and end all nodes. Leaves at once."""
    control = socket.socket(fileno=int(sys.argv[1]))
    code = 1
    try:
        die_with_parent()
        for asking in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(asking, signal.SIG_IGN)
        switch = Switch(control, Network.from_data(json.loads(sys.argv[2])))
        try:
            switch.build()
        except (Impossible, OSError) as error:
            control.send(json.dumps({"problem": str(error)}).encode())
            os._exit(1)
        try:
            switch.serve()
        finally:
            for number in range(len(switch.nodes)):
                switch.do_kill([], number)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    main()

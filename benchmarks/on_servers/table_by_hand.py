"""The table of `task.py` trained in one process, by a loop written by hand.

    python table_by_hand.py

Prints the monotonic time after every step as one line of JSON.
"""

from __future__ import annotations

import json
import time

import torch
from sizes import RATE, TABLE_BATCH, TABLE_STEPS
from task import lookups, table
from torch.optim import SGD


def main() -> None:
    """Train, with as many threads as a process of a job has."""
    torch.set_num_threads(1)
    model = table()
    optimizer = SGD(model.parameters(), lr=RATE)
    rows, targets = lookups()
    times = []
    for step in range(TABLE_STEPS):
        start = step * TABLE_BATCH % len(rows)
        chosen = slice(start, start + TABLE_BATCH)
        loss = (model(rows[chosen]) - targets[chosen]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.monotonic())
    print(json.dumps(times))


main()

"""What ranks do in the tests of places: they say what they see."""

from __future__ import annotations

import os
from pathlib import Path


def says_its_devices(path: str) -> int:
    Path(path).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    return 0


def says_home_and_card(path: str) -> int:
    with open(path, "a") as file:
        print(os.environ["HOME"], os.environ["NCCL_SOCKET_IFNAME"], file=file)
    return 0

"""What joins two nodes, and its text: `100mbit`, `1ms`. Read by `--place` and by `--strategy auto`.

`--place simulated` makes such links; the dial asks what they cost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from allranks.errors import RequestError

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_DELAY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")


@dataclass(frozen=True)
class Link:
    """What a node can send and receive at once, and how long a packet is under way between two.

    `bits_per_s` of 0 is as fast as this machine moves bytes; `source` says who told.
    """

    bits_per_s: float = 0.0
    one_way_s: float = 0.0
    source: str = "said"

    def __str__(self) -> str:
        if not self.bits_per_s:
            return "an unlimited link"
        for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
            if self.bits_per_s >= size:
                return f"{self.bits_per_s / size:g} {unit}"
        return f"{self.bits_per_s / 1e3:g} kbit/s"


def parse_rate(text: str, asked: str) -> float:
    """Bits per second of a text like 100mbit, 0 (no bound) of none; raises `RequestError`."""
    if not text:
        return 0.0
    found = _RATE.fullmatch(text)
    if found is None or float(found[1]) == 0:
        raise RequestError(
            asked=asked,
            found=f"link={text}",
            why="a link carries so many bits per second",
            do="for example link=1gbit, link=100mbit or link=2.5gbit",
        )
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def parse_delay(text: str, asked: str) -> float:
    """Seconds of a text like 1ms; raises `RequestError`."""
    found = _DELAY.fullmatch(text)
    if found is None:
        raise RequestError(
            asked=asked,
            found=f"delay={text}",
            why="a delay is added to every packet",
            do="for example delay=1ms or delay=500us",
        )
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]

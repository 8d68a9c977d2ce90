"""`auto:link=100mbit,delay=1ms,exact=yes`: what is asked of the dial, checked. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.errors import RequestError, nearest
from allranks.strategies.choice import TRUTH, parse_choice
from allranks.strategies.dial.link import Link, parse_delay, parse_rate

AUTO = "auto"
OPTIONS = ("link", "delay", "exact")


@dataclass(frozen=True)
class DialRequest:
    """`--strategy auto` as asked: the link, where it is said; whether only EXACT ones will do."""

    text: str
    link: Link | None = None
    exact: bool = False


def is_auto(text: str) -> bool:
    """Whether a text of `--strategy` leaves the choice to the dial."""
    return text.partition(":")[0].partition("(")[0] == AUTO


def parse_dial(text: str) -> DialRequest:
    """What `auto:…` asks for; raises `RequestError` for options that the dial does not have."""
    options, asked = parse_choice(text).options, f"--strategy {text}"
    for name in options:
        if name not in OPTIONS:
            raise RequestError(
                asked=asked,
                found=f"no option {name!r} of auto",
                why="a misspelt one would be passed over, and another method be chosen",
                do=nearest(name, OPTIONS),
            )
    if "delay" in options and "link" not in options:
        raise RequestError(
            asked=asked,
            found="a delay without a link",
            why="what a message takes is its delay and its bytes at the speed of the link",
            do=f"--strategy auto:link=100mbit,delay={options['delay']}",
        )
    exact = TRUTH.get(options.get("exact", "no").lower())
    if exact is None:
        raise RequestError(
            asked=asked,
            found=f"exact={options['exact']}",
            why="it says whether only strategies that are EXACT will do: yes or no",
            do=f"--strategy {AUTO}:exact=yes",
        )
    link = None
    if "link" in options:
        rate = parse_rate(options["link"], asked)
        one_way_s = parse_delay(options["delay"], asked) if "delay" in options else 0.0
        link = Link(rate, one_way_s, "said")
    return DialRequest(text, link, exact)


def check_dial(request: DialRequest, *, ranks: int, bitwise: bool, many_on_torch: bool) -> None:
    """Raise `RequestError` where there is nothing to choose among."""
    asked = f"--strategy {request.text}"
    if ranks == 1:
        raise RequestError(
            asked=f"{asked} --ranks 1",
            found="one rank",
            why="it sends nothing, so there is nothing to send less of",
            do="leave --strategy out, or --ranks 2 or more",
        )
    if bitwise:
        raise RequestError(
            asked=f"{asked} --bitwise",
            found="equal bits on any ranks",
            why="that is one tree of sums over all shards, which no way of sending less keeps",
            do="--strategy ddp --bitwise, or drop --bitwise",
        )
    if not many_on_torch:
        raise RequestError(
            asked=asked,
            found="another engine than torch",
            why="the methods that the dial chooses among are strategies of torch",
            do="--engine torch, or name a strategy: see `allranks strategies`",
        )

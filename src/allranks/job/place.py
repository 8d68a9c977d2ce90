"""Where a job runs, as its words say it: `local`, `slurm`, `simulated:link=1gbit,delay=1ms`. Pure.

The text of `--place` is taken apart here and nowhere else. What a place is and does stands in its
class, which `catalog.PLACES` names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from allranks.catalog import PLACES, load
from allranks.errors import RequestError, nearest
from allranks.strategies.choice import Choice, parse_choice
from allranks.strategies.dial.link import parse_delay, parse_rate

LOCAL = "local"
"""The place of a job that names none."""


@dataclass(frozen=True)
class PlaceSpec:
    """A place by its name, and its options with their values; `text` is how it is written.

    Options are those of simulated nodes: `link` in bits per second, `delay` in seconds.
    """

    name: str = LOCAL
    options: Mapping[str, float] = field(default_factory=dict)
    text: str = LOCAL

    def __str__(self) -> str:
        return self.text


def place_spec(text: str) -> PlaceSpec:
    """The place that a text names; raises `RequestError` for one that is not known."""
    choice = parse_choice(text, "--place")
    if choice.name not in PLACES:
        raise RequestError(
            asked=f"--place {choice.name}",
            found="no place of that name in this version",
            why=f"place is one of {', '.join(PLACES)}",
            do=nearest(choice.name, PLACES),
        )
    if choice.options and not load(PLACES[choice.name]).has_links:
        raise RequestError(
            asked=f"--place {text}",
            found=f"options of {choice.name}",
            why="only simulated nodes have links that can be chosen",
            do=f"--place {choice.name}, or --place {Choice('simulated', choice.options)}",
        )
    for name in choice.options:
        if name not in _READERS:
            raise RequestError(
                asked=f"--place {text}",
                found=f"no option {name!r} of simulated nodes",
                why="a misspelt one would be passed over, and the links be faster than asked",
                do=nearest(name, _READERS),
            )
    given = [(name, read) for name, read in _READERS.items() if name in choice.options]
    options = {name: read(choice.options[name], f"--place {text}") for name, read in given}
    return PlaceSpec(choice.name, options, text)


_READERS: dict[str, Callable[[str, str], float]] = {"link": parse_rate, "delay": parse_delay}

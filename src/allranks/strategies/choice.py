"""The syntax of `--strategy`: `ddp:reduce=power-sgd(rank=4),bucket_mb=1`.

A choice is a name with options; the value of an option may be a choice again, in brackets. The
text is only parsed here; the cards define names and options.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from allranks.errors import RequestError

AUTO = "auto"
"""What `--strategy` says to leave the choice to the dial."""


@dataclass(frozen=True)
class Choice:
    """A name and its options, as written: every value is text until a card gives it a type."""

    name: str
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


def parse_choice(text: str, flag: str = "--strategy") -> Choice:
    """`name`, `name:key=value,…` or `name(key=value,…)`; raises `RequestError` on anything else."""
    try:
        return _parsed(text)
    except _Unreadable as error:
        raise _unreadable(text, str(error), flag) from None


def _parsed(text: str) -> Choice:
    name, colon, tail = text.partition(":")
    if "(" in name:
        name, _, tail = text.partition("(")
        if not tail.endswith(")"):
            raise _Unreadable("a bracket is not closed at the end")
        tail, colon = tail[:-1], "("
    if not name or not all(letter.isalnum() or letter in "-_" for letter in name):
        raise _Unreadable(f"{name!r} is not a name")
    options: dict[str, str] = {}
    for part in split_outside_brackets(tail) if colon else ():
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise _Unreadable(f"{part!r} is not key=value")
        if key in options:
            raise _Unreadable(f"option {key!r} is given twice")
        options[key] = value
    return Choice(name, options)


def split_outside_brackets(text: str) -> list[str]:
    """Cut at commas that stand outside brackets; raises `ValueError` if these do not match."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            raise _Unreadable("a bracket closes that was never opened")
        if letter == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise _Unreadable("a bracket is not closed")
    return [*parts, text[start:]]


class _Unreadable(ValueError):
    """What is wrong with a text."""


def is_auto(text: str) -> bool:
    """Whether a text of `--strategy` leaves the choice to the dial."""
    return text.partition(":")[0].partition("(")[0] == AUTO


_EXAMPLES = {
    "--strategy": "write it like ddp, ddp:bucket_mb=1 or ddp:reduce=tree; "
    "see `allranks strategies`",
    "--place": "write it like local, slurm, simulated or simulated:link=1gbit,delay=1ms",
}


def _unreadable(text: str, problem: str, flag: str) -> RequestError:
    return RequestError(
        asked=f"{flag} {text}",
        found=problem,
        why=f"{flag} reads NAME, or NAME:option=value,… with nested choices in brackets",
        do=_EXAMPLES[flag],
    )


TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

"""Faults of what ranks write: one file by several of them, one line by all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from allranks.tools.watch.facts import Rank, line_of
from allranks.tools.watch.finding import FILES, OUTPUT, Finding, place_of


def files_of_several_ranks(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """A path that two ranks or more write: a checkpoint, or what each of them downloads."""
    writers: dict[tuple[str, str], list[int]] = defaultdict(list)
    lines: dict[tuple[str, str], tuple[str, int] | None] = {}
    for rank in ranks:
        for fact in rank.all("file"):
            key = fact["path"], fact["how"]
            writers[key].append(rank.rank)
            lines.setdefault(key, line_of(fact["where"]))
    for (path, how), who in writers.items():
        if len(who) < 2 or (how == "open" and (path, "save") in writers):
            continue
        yield Finding(
            "checkpoint-of-all-ranks" if how == "save" else "file-of-all-ranks",
            FILES,
            lines[path, how],
            f"{path} is written by ranks {', '.join(map(str, who))}",
            "they write into each other's file: it may be torn, and a reader may meet a part of it",
            "if rank == 0: write it; then a barrier before anybody reads it",
        )


def lines_of_all_ranks(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """Lines of the script that print the same text on every rank."""
    if len(ranks) < 2:
        return
    printed = [{(str(f["where"]), f["digest"]): f for f in rank.all("print")} for rank in ranks]
    common = [printed[0][key] for key in printed[0] if all(key in one for one in printed)]
    common = [fact for fact in common if fact["text"].strip()]
    if common:
        places = list(dict.fromkeys(place_of(line_of(fact["where"])) for fact in common))
        more = f", and from {len(places) - 1} more lines" if len(places) > 1 else ""
        yield Finding(
            "printed-by-all-ranks",
            OUTPUT,
            line_of(common[0]["where"]),
            f"{len(ranks)} ranks print the same, first {common[0]['text']!r}{more}",
            "nothing to the result; logs grow with the ranks",
            "if rank == 0: print(…)",
        )

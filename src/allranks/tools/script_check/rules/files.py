"""Faults of what ranks write: one file by several, one read too early, one line by all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from allranks.tools.script_check.rules.facts import (
    FILES,
    OUTPUT,
    Fact,
    Finding,
    Rank,
    line_of,
    place_of,
)

READ = "read"


def files_of_several_ranks(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """A path that two ranks or more write: a checkpoint, or what each of them downloads."""
    writers: dict[tuple[str, str], dict[int, None]] = defaultdict(dict)
    lines: dict[tuple[str, str], tuple[str, int] | None] = {}
    for rank in ranks:
        for fact in rank.all("file"):
            if (how := fact["how"]) != READ:
                writers[fact["path"], how][rank.rank] = None
                lines.setdefault((fact["path"], how), line_of(fact["where"]))
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


def files_read_too_early(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """A path that one rank writes and another reads, with no collective between them.

    Ranks that lock files are left out: they may wait for each other so.
    """
    written: dict[tuple[str, tuple[int, ...]], int] = {}
    open_ranks = [rank for rank in ranks if not rank.all("lock")]
    for rank in open_ranks:
        for fact in rank.all("file"):
            if fact["how"] != READ and fact["at"] is not None:
                written.setdefault((fact["path"], tuple(fact["at"])), rank.rank)
    found = dict[str, Finding]()
    for rank in open_ranks:
        own = {fact["path"] for fact in rank.all("file") if fact["how"] != READ}
        for fact in rank.all("file"):
            path = fact["path"]
            writer = written.get((path, tuple(fact["at"] or ())))
            if fact["how"] != READ or writer is None or path in own or path in found:
                continue
            found[path] = Finding(
                "read-while-written",
                FILES,
                line_of(fact["where"]),
                f"rank {rank.rank} reads {path}, which rank {writer} writes, and no collective"
                " of all ranks lies between",
                "it may meet a part of the file, an old one, or none",
                "torch.distributed.barrier() after the write, before the others read",
            )
    yield from found.values()


def lines_of_each_node(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """Lines of the script that the first rank of each node prints, and no other."""
    first = [rank for rank in ranks if rank.last("process", "local_rank", None) == "0"]
    nodes = {rank.last("process", "group_rank", None) for rank in first}
    others = [rank for rank in ranks if rank not in first]
    if len(nodes) < 2 or len(nodes) != len(first) or not others:
        return
    common = _printed_by_all(first)
    spoken = {str(fact["where"]) for rank in others for fact in rank.all("print")}
    common = [fact for fact in common if str(fact["where"]) not in spoken]
    if common:
        yield Finding(
            "printed-once-per-node",
            OUTPUT,
            line_of(common[0]["where"]),
            f"the first ranks of {len(nodes)} nodes print the same,"
            f" first {common[0]['text']!r}{_more(common)}",
            "nothing to the result; a log holds it once per node, as what is written there is",
            "if dist.get_rank() == 0: print(…), not LOCAL_RANK",
        )


def lines_of_all_ranks(ranks: tuple[Rank, ...]) -> Iterator[Finding]:
    """Lines of the script that print the same text on every rank."""
    if len(ranks) < 2:
        return
    if common := _printed_by_all(ranks):
        yield Finding(
            "printed-by-all-ranks",
            OUTPUT,
            line_of(common[0]["where"]),
            f"{len(ranks)} ranks print the same, first {common[0]['text']!r}{_more(common)}",
            "nothing to the result; logs grow with the ranks",
            "if rank == 0: print(…)",
        )


def _printed_by_all(ranks: Sequence[Rank]) -> list[Fact]:
    """What each of them printed from one line, as the first of them told it."""
    printed = [{(str(f["where"]), f["digest"]): f for f in rank.all("print")} for rank in ranks]
    common = [printed[0][key] for key in printed[0] if all(key in one for one in printed)]
    return [fact for fact in common if fact["text"].strip()]


def _more(common: list[Fact]) -> str:
    places = dict.fromkeys(place_of(line_of(fact["where"])) for fact in common)
    return f", and from {len(places) - 1} more lines" if len(places) > 1 else ""

"""What `slow_link.py` has found: bars, the dial's choices, the time to a loss, and the plots."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness import Comparison, Interval, median_interval
from trainings import Curves

from allranks.strategies.auto import LinkSpeed, ModelFacts, choose, parse_rate
from allranks.tools.bench.figure import Curve, plot

LINKS = ("100mbit", "1gbit", "10gbit", "")
SLOWEST = "100mbit"
COMPUTE = "independent"
COMPRESSING = ("ddp:reduce=one-bit", "ddp:reduce=power-sgd")
"""Methods that are to be three times as fast as `ddp`, on the slowest link and large layers."""
STREAMED = "diloco:every=50,bits=4,fragments=4,overlap=4"
OUTER = ("local-sgd:every=16", "diloco:every=50", STREAMED, "sparse-loco:every=30")
"""Methods that are to be as fast on the slowest link as on none, but for a tenth."""
FEWEST, FEWER_BYTES = "sparse-loco:every=30", 1 / 146
WITHIN, COMBINATIONS_WITHIN = 1.1, 20


@dataclass(frozen=True)
class Timed:
    """One method at one link, turn by turn: seconds of a step, of compute in it, and of `ddp`.

    `sent_bytes` are those of the busiest rank in a step.
    """

    model: str
    ranks: int
    link: str
    method: str
    steps_s: list[float]
    computes_s: list[float]
    ddp_s: list[float]
    sent_bytes: float

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def compute_s(self) -> float:
        return statistics.median(self.computes_s)

    @property
    def where(self) -> str:
        return f"{self.model}, {self.ranks} ranks, {self.link or 'unlinked'}"

    def over(self, others: list[float]) -> Interval:
        """Its steps over those of the same turns."""
        return median_interval(
            [own / other for own, other in zip(self.steps_s, others, strict=True)]
        )


def judged(facts: ModelFacts, link: str, rows: list[Timed]) -> dict[str, Any]:
    """The dial's choice over this link beside the fastest method that was measured."""
    there = LinkSpeed(parse_rate(link, link), source="place")
    decision = choose("auto", replace(facts, link=there))
    measured = {row.method: row.step_s for row in rows if row.method != COMPUTE}
    fastest = min((name for name in measured if "whole" not in name), key=lambda n: measured[n])
    predicted = {p.strategy: p.step_s for p in decision.predictions}
    return {
        "facts": asdict(decision.facts),
        "choice": decision.did,
        "why": decision.why,
        "fastest": fastest,
        "choice_over_fastest": measured[decision.did] / measured[fastest],
        "predicted_over_measured": {
            name: predicted[name] / measured[name] for name in predicted if name in measured
        },
    }


def judged_again(then: dict[str, Any], rows: list[Timed]) -> dict[str, Any]:
    """The same of a record, by the dial as it is now."""
    facts = {**then["facts"], "link": LinkSpeed(**then["facts"]["link"])}
    facts["shapes"] = tuple(map(tuple, facts["shapes"]))
    place = {name: then[name] for name in ("model", "ranks", "link")}
    own = [row for row in rows if all(getattr(row, n) == it for n, it in place.items())]
    return {**place, **judged(ModelFacts(**facts), then["link"], own)}


def comparisons(rows: list[Timed], dial: list[dict[str, Any]]) -> list[Comparison]:
    """What the bars are about, and every method beside `ddp`."""
    found = []
    for row in rows:
        if row.method in ("ddp", COMPUTE):
            continue
        is_slow = row.link == SLOWEST
        of_third = is_slow and row.model == "VGG-like" and row.method in COMPRESSING
        bar = 1 / 3 if of_third else None
        beside = row.over(row.ddp_s)
        found.append(Comparison(row.where, "ratio", "step_s", row.method, "ddp", beside, bar))
        if is_slow and row.method in OUTER:
            alone = row.over(row.computes_s)
            what = Comparison(row.where, "ratio", "step_s", row.method, COMPUTE, alone, 1 / 0.9)
            found.append(what)
        if "whole" in row.method:
            found.append(_beside_its_formula(row))
    found += _fewer_bytes(rows)
    good = sum(each["choice_over_fastest"] <= WITHIN for each in dial)
    interval = median_interval([each["choice_over_fastest"] for each in dial])
    what = f"dial: {good} of {len(dial)} combinations within {WITHIN} (bar: {COMBINATIONS_WITHIN})"
    found.append(Comparison(what, "ratio", "step_s", "auto", "fastest", interval, WITHIN))
    return found


def _fewer_bytes(rows: list[Timed]) -> list[Comparison]:
    """Bytes of a step beside those of `ddp`; they are counted, and the same in every run."""
    sent = {(r.model, r.ranks, r.method): r.sent_bytes for r in rows if r.link == SLOWEST}
    found = []
    for (model, ranks, method), own in sent.items():
        if own and method != "ddp" and "whole" not in method:
            interval = Interval(*[own / sent[model, ranks, "ddp"]] * 3, confidence=1.0, pairs=1)
            bar = FEWER_BYTES if method == FEWEST else None
            what = f"{model}, {ranks} ranks"
            found.append(Comparison(what, "ratio", "sent_bytes", method, "ddp", interval, bar))
    return found


def _beside_its_formula(row: Timed) -> Comparison:
    """Measured over compute + bytes / link, where `sent_bytes` are the mean of a step."""
    sending = row.sent_bytes * 8 / parse_rate(row.link, row.link)
    interval = row.over([compute + sending for compute in row.computes_s])
    over = "compute + bytes/(H·link)"
    return Comparison(row.where, "ratio", "step_s", row.method, over, interval, WITHIN)


def time_to_loss(rows: list[Timed], curves: dict[str, Curves]) -> list[dict[str, Any]]:
    """Seconds until a method has the final loss of `ddp`: steps from curves, seconds from here."""
    found = []
    for row in rows:
        own = curves.get(row.model)
        if own is None or row.method not in own.losses:
            continue
        steps = own.steps_to(row.method, own.final("ddp"))
        found.append(
            {
                "what": row.where,
                "contender": row.method,
                "final_loss": own.final(row.method),
                "steps_to_loss_of_ddp": steps,
                "seconds_to_loss_of_ddp": None if steps is None else steps * row.step_s,
            }
        )
    return found


def row_of(row: Timed, batch_size: int) -> dict[str, Any]:
    """A line of the table."""
    return {
        "what": row.where,
        "contender": row.method,
        "step_ms": row.step_s * 1e3,
        "compute_ms": row.compute_s * 1e3,
        "communication_ms": (row.step_s - row.compute_s) * 1e3,
        "sent_kb_per_step": row.sent_bytes / 1e3,
        "sent_bytes_per_sample": row.sent_bytes * row.ranks / batch_size,
    }


def drawn(rows: list[Timed], folder: Path, day: str) -> None:
    """A plot for each model, on the most ranks: the step over the link, each method a curve."""
    speeds = {link: parse_rate(link, link) / 1e6 for link in LINKS if link}
    most = max(row.ranks for row in rows)
    shown = ("ddp", "ddp:late=1", "local-sgd:every=16", "diloco:every=50")
    for model in {row.model for row in rows}:
        curves = []
        for method in shown:
            its = [r for r in rows if (r.model, r.ranks, r.method) == (model, most, method)]
            points = [(speeds[r.link], *(r.step_s,) * 3) for r in its if r.link]
            curves.append(Curve(method, sorted(points)))
        title = f"{model}, {most} nodes: seconds of a step"
        text = plot(title, "Mbit/s between nodes", "s", curves)
        (folder / f"slow-link-{model.lower()}-{day}.svg").write_text(text)

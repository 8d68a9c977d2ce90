"""The dial: its arithmetic by hand, what it chooses along links, what it refuses and records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.run_folder import read_rows
from allranks.launcher.describe import link_of
from allranks.launcher.places import Rendezvous
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import plan_only
from allranks.strategies import auto as cost
from allranks.strategies.auto import (
    SLACK,
    Candidate,
    LinkSpeed,
    ModelFacts,
    candidates,
    choose,
    parse_dial,
)
from allranks.strategies.cards import CARDS
from allranks.tools.check.check import checked_in_scratch

MILLION = 1_000_000
STREAMED = "diloco:every=50,bits=4,fragments=4,overlap=4"
SLOW, FAST = LinkSpeed(1e8), LinkSpeed(1e10)
FACTS = ModelFacts(parameters=10 * MILLION, compute_s=0.4, ranks=4, nodes=4, link=SLOW)


def step_s(text: str, facts: ModelFacts) -> float:
    found = {p.strategy: p.step_s for p in choose("auto", facts).predictions}
    return found[text]


def test_a_step_of_ddp_by_hand() -> None:
    """60 MB at 0.94 · 100 Mbit/s, six rounds for each of two buckets, half of it behind backward
    as far as that lasts and no processor copies."""
    sent = 2 * 3 / 4 * (40 * MILLION + 64)
    moving = sent * 8 / (0.94 * 1e8)
    hidden = 1 / 2 * min(moving - sent * cost.COPYING_S, 2 / 3 * 0.4)
    expected = 0.4 * (1 + cost.SKEW) + moving + 2 * 6 * cost.MESSAGE_S - hidden
    assert step_s("ddp", FACTS) == pytest.approx(expected, rel=1e-12)


def test_a_meeting_every_h_steps_is_paid_by_h_steps() -> None:
    sent = 2 * 3 / 4 * (40 * MILLION + 64) / 16
    moving = sent * 8 / (0.94 * 1e8)
    arithmetic = 1e-8 * 10 * MILLION / 16
    expected = 0.4 * (1 + cost.SKEW / 16) + moving + 6 * cost.MESSAGE_S / 16 + arithmetic
    assert step_s("local-sgd:every=16", FACTS) == pytest.approx(expected, rel=1e-6)


def test_what_sparse_loco_sends_is_counted_by_chunks() -> None:
    """64 of 4,096 numbers at 14 bits, and a scale: 116 bytes a chunk, to each of three others."""
    found = {p.strategy: p.sent_bytes for p in choose("auto", FACTS).predictions}
    chunks = -(-10 * MILLION // 4096)
    expected = (3 * chunks * 116 + 2 * 3 / 4 * 64) / 30
    assert found["sparse-loco:every=30"] == pytest.approx(expected, rel=1e-3)


def test_what_is_under_way_while_learners_train_hides_behind_that() -> None:
    """Half a byte a number and 4 bytes for 512, to three others; 16 of 50 steps hide the link."""
    facts = replace(FACTS, parameters=512 * 20_000, compute_s=0.1)
    sent = (3 * 20_000 * (256 + 4) + 2 * 3 / 4 * 64) / 50
    moving = sent * 8 / (0.94 * 1e8)
    arithmetic = 2e-8 * facts.parameters / 50
    seconds = 4 * 6 * cost.MESSAGE_S / 50 + moving
    expected = 0.1 * (1 + cost.SKEW / 50) + arithmetic + seconds
    hidden = seconds - sent * cost.COPYING_S
    assert hidden < 16 / 50 * 0.1
    assert step_s(STREAMED, facts) == pytest.approx(expected - hidden, rel=1e-3)
    slower = replace(facts, link=LinkSpeed(1e7))
    assert step_s(STREAMED, slower) > 0.1 + 10 * moving - 16 / 50 * 0.1


@pytest.mark.parametrize(
    ("route", "crossings"),
    [
        ("ring", 1.0),
        ("all-to-all", 4 * (8 - 4) / 7),
        ("hierarchical", 1.0 / (2 * 3 / 4 + 2 * 1 / 2 / 4)),
    ],
)
def test_how_often_bytes_cross_the_link_of_two_nodes_of_four(route: Any, crossings: float) -> None:
    facts = replace(FACTS, ranks=8, nodes=2, per_node=4)
    assert cost.crossings(Candidate("ddp", "", route=route), facts) == pytest.approx(crossings)


def test_ranks_that_share_cores_compute_for_longer_and_hide_less() -> None:
    alone, busy = FACTS, replace(FACTS, busy=2.0, link=FAST)
    assert step_s("local-sgd:every=16", busy) > 2 * alone.compute_s
    assert step_s("ddp:late=1", busy) - 2 * busy.compute_s > 0


def test_the_faster_the_link_the_less_is_lost() -> None:
    """And what is chosen is within the slack of the fastest, and first of all that are."""
    order = [candidate.text for candidate in candidates(FACTS)]
    places = []
    for rate in (1e7, 1e8, 1e9, 1e10, 1e11):
        decision = choose("auto", replace(FACTS, link=LinkSpeed(rate)))
        steps = {p.strategy: p.step_s for p in decision.predictions}
        good = [text for text in order if steps[text] <= SLACK * min(steps.values())]
        assert decision.did == good[0]
        places.append(order.index(decision.did))
    assert places == sorted(places, reverse=True)
    assert places[0] > 0
    assert choose("auto", replace(FACTS, link=FAST, parameters=10_000)).did == "ddp"


def test_every_candidate_is_a_strategy_with_a_period_within_its_card() -> None:
    for facts in (FACTS, replace(FACTS, ranks=8, nodes=2, per_node=4)):
        for candidate in candidates(facts):
            spec = candidate.spec(facts.ranks)
            defaults = {o.name: o.default for o in CARDS[spec.name].options}
            assert candidate.period(facts.ranks) <= defaults.get("every", 1)


def test_a_short_job_meets_eight_times() -> None:
    found = {c.text for c in candidates(replace(FACTS, steps=64))}
    assert "local-sgd:every=8" in found
    assert "local-sgd:every=16" not in found


def test_exact_leaves_only_exact_ones() -> None:
    decision = choose("auto:exact=yes", FACTS, exact=True)
    assert decision.did == "ddp"
    assert [p.strategy for p in decision.predictions] == ["ddp"]
    assert set(decision.refused.values()) == {"exact=yes was asked for"}
    several = replace(FACTS, ranks=8, nodes=2, per_node=4)
    assert choose("auto", several, exact=True).did == "ddp:reduce=hierarchical(group=4)"


def test_the_sentence_has_the_arithmetic_and_the_price() -> None:
    facts = replace(FACTS, compute_s=0.05, link=LinkSpeed(1e8, 0.001))
    decision = choose("auto:link=100mbit", facts, refusal=lambda c: "no" * ("loco" in c.text))
    assert decision.did == "local-sgd:every=16"
    for words in (
        "ddp would send 60 MB a step",
        "over 100 Mbit/s beside 50 ms of compute",
        "it costs",
    ):
        assert words in decision.why
    apart = ("diloco:every=50", STREAMED, "sparse-loco:every=30")
    assert decision.refused == dict.fromkeys(apart, "no")


@pytest.mark.parametrize(
    ("strategy", "more", "found"),
    [
        ("auto:lonk=1gbit", {}, "no option 'lonk' of auto"),
        ("auto:link=fast", {}, "link=fast"),
        ("auto:delay=1ms", {}, "a delay without a link"),
        ("auto:exact=maybe", {}, "exact=maybe"),
        ("auto", {"ranks": 1}, "one rank"),
        ("auto", {"bitwise": True}, "equal bits on any ranks"),
        ("auto", {"engine": "tensorflow"}, "another engine than torch"),
    ],
)
def test_what_the_dial_cannot_do_is_refused(
    strategy: str, more: dict[str, Any], found: str
) -> None:
    program = "digits-keras" if more.get("engine") else "digits"
    with pytest.raises(RequestError) as refused:
        resolve(program, {"strategy": strategy, "ranks": 2, **more})
    assert refused.value.found == found
    assert "auto" in refused.value.asked


@pytest.mark.parametrize(
    ("strategy", "more", "found"),
    [
        ("auto:link=1gbit", {}, "one node"),
        ("auto", {"nodes": 2, "place": "slurm"}, "a link between the nodes that nobody has named"),
        ("auto:link=1gbit", {"nodes": 2, "place": "simulated:link=1mbit"}, "two links"),
    ],
)
def test_a_link_is_known_or_refused(strategy: str, more: dict[str, Any], found: str) -> None:
    job = resolve("digits", {"strategy": "ddp", "ranks": 2, **more}).job
    with pytest.raises(RequestError) as refused:
        link_of(parse_dial(strategy), job)
    assert refused.value.found == found


def test_simulated_nodes_say_their_link() -> None:
    place = {"nodes": 2, "place": "simulated:link=1mbit,delay=2ms"}
    job = resolve("digits", {"strategy": "ddp", "ranks": 2, **place}).job
    assert link_of(parse_dial("auto"), job) == LinkSpeed(1e6, 0.004, "place")


def test_a_check_wants_a_name() -> None:
    resolved = resolve("digits", {"strategy": "auto", "ranks": 2})
    with pytest.raises(RequestError, match="a strategy that is chosen when a job starts"):
        checked_in_scratch(resolved, None, explicit=True, bounded=True)


@pytest.mark.slow
def test_a_plan_on_nodes_has_the_decision_and_its_strategy(tmp_path: Path) -> None:
    flags = {"strategy": "auto", "ranks": 4, "nodes": 4, "place": "simulated:link=1mbit"}
    resolved = resolve("digits", {**flags, "run_dir": str(tmp_path / "run")})
    with plan_only(resolved, Rendezvous()) as (plan, _):
        decision = plan.decision
    assert decision is not None
    assert plan.job.strategy_spec.name == decision.did.partition(":")[0] != "ddp"
    assert (
        decision.facts.parameters == 9_978
    )  # 9·16 + 9·16·32 of convolutions, 2·48 of norms, 513·10
    assert decision.facts.compute_s > 0
    assert plan.notes[0].startswith(f"auto -> {decision.did}: ddp would send ")
    assert json.loads(json.dumps(plan.to_data()))["decision"]["did"] == decision.did


@pytest.mark.slow
def test_a_run_records_the_choice_and_keeps_it(server: ForkServer, train: Any) -> None:
    flags = {"strategy": "auto", "ranks": 2, "steps": 4, "checkpoint_every": 2}
    run = train("digits", **flags).run_dir
    (row,) = (row for row in read_rows(run / "events.jsonl") if row["event"] == "chosen")
    assert (row["asked"], row["did"]) == ("auto", "ddp")
    assert "the memory of one machine" in row["why"]
    assert 'strategy = "ddp"' in (run / "job.toml").read_text()
    again = resolve("", {"run_dir": str(run), "strategy": "auto", "ranks": 2})
    assert again.dial is None
    assert again.job.strategy == "ddp"
    assert again.sources["strategy"] == f"run {run}"

"""What the facts of ranks prove, and what they do not: pure, on facts written down here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import RequestError
from allranks.tools.script_check.rules.facts import NOTE, Rank, ScriptFinding, read_ranks
from allranks.tools.script_check.rules.watch import Watched, findings_of, watched_in

LINE = ["train.py", 7]


def fact(kind: str, **values: Any) -> dict[str, Any]:
    return {"fact": kind, "where": LINE, **values}


def loader(**values: Any) -> dict[str, Any]:
    usual = {"length": 32, "sampler": "DistributedSampler", "shuffle": True, "replicas": 2}
    return fact("loader", loader=0, sampler_where=None, **{**usual, **values})


def one_pass(ids: list[int], number: int = 0, **values: Any) -> dict[str, Any]:
    rows = {str(i): [i, i % 3] for i in ids}
    usual = {"samples": len(ids), "order": hash(tuple(ids)), "sizes": [[len(ids), 1]], "ids": ids}
    usual |= {"rows": rows, "ended": True, "grad": True, "backwards": 4, "epochs_set": 0}
    return fact("pass", loader=0, number=number, **{**usual, **values})


def window(**values: Any) -> dict[str, Any]:
    usual = {"id": 0, "optimizer": 0, "step": 1, "backwards": 1, "backward_where": LINE}
    usual |= {"accumulated": False, "is_mean": False, "unchanged": None, "sent": False}
    return fact("window", **{"forwards": [[0, True]], **usual, **values})


def digest(step: int, of: str = "replica", forwards: int = 3, **names: int) -> dict[str, Any]:
    return fact("digest", of=of, id=0, step=step, parameters=names, buffers={}, forwards=forwards)


def large(count: int) -> dict[str, Any]:
    return fact("collectives", large=count, to_one=0)


REPLICA = fact("replica", id=0, group=[0, 1], broadcast_buffers=True, tensors=2)
SGD = fact("optimizer", id=0, name="SGD", replicas=[], outside={"head": [2]}, sent=[])


def names(*ranks: list[dict[str, Any]]) -> list[str]:
    return [one.name for one in of(*ranks) if one.touches != NOTE]


def of(*ranks: list[dict[str, Any]]) -> tuple[ScriptFinding, ...]:
    return findings_of(tuple(Rank(i, tuple(facts)) for i, facts in enumerate(ranks)))


def both(*facts: dict[str, Any]) -> list[str]:
    return names(list(facts), list(facts))


def test_an_order_that_changes_once_in_three_epochs_is_no_finding() -> None:
    same, other = list(range(16)), list(range(16, 0, -1))
    assert both(loader(), one_pass(same), one_pass(same, 1)) == ["same-order-each-epoch"]
    assert both(loader(), one_pass(same), one_pass(same, 1), one_pass(other, 2)) == []
    assert both(loader(), one_pass(same), one_pass(same, 1, backwards=0)) == []
    assert both(loader(shuffle=False), one_pass(same), one_pass(same, 1)) == []


def test_a_rank_with_a_dataset_of_its_own_shares_no_samples() -> None:
    """The indices are equal; that the samples are, only what was in the batches can tell."""
    plain, ids = loader(sampler="RandomSampler", replicas=None), list(range(16))
    mine = one_pass(ids)
    its = one_pass(ids, rows={str(i): [100 + i, 50 + i] for i in ids})
    assert names([REPLICA, plain, mine], [REPLICA, plain, its]) == []
    assert names([REPLICA, plain, mine], [REPLICA, plain, mine]) == ["same-samples-on-ranks"]
    labels_only = one_pass(ids, rows={str(i): [100 + i, i % 3] for i in ids})  # noise was added
    assert names([REPLICA, plain, mine], [REPLICA, plain, labels_only]) == ["same-samples-on-ranks"]
    constant = [one_pass(ids, rows={str(i): [k + i, 0] for i in ids}) for k in (0, 100)]
    assert names([REPLICA, plain, constant[0]], [REPLICA, plain, constant[1]]) == []


def test_samples_shared_by_padding_or_without_a_reduction_are_no_finding() -> None:
    padded = [one_pass([*range(0, 32, 2), 0]), one_pass([*range(1, 32, 2), 0])]
    assert names(*([REPLICA, loader(), one] for one in padded)) == []
    assert both(loader(sampler="RandomSampler"), one_pass(list(range(16)))) == []


def test_a_look_at_one_batch_is_not_the_first_epoch() -> None:
    plain, look = loader(sampler="RandomSampler"), one_pass([0, 1], backwards=0, ended=False)
    assert both(REPLICA, plain, look, one_pass(list(range(16)), 1)) == ["same-samples-on-ranks"]


def evaluation(total: float, length: float, *more: float) -> list[str]:
    ids = [list(range(0, 10, 2)), [*range(1, 9, 2), 9, 0]]
    reduced = fact(
        "reduced",
        after=[0, 0],
        values=[3.0, total, *more],
        before=[],
        name="all_reduce",
        operation="SUM",
    )
    found = []
    for one in ids:
        taken = one_pass(one, backwards=0, grad=False)
        found.append([loader(length=length, shuffle=False), taken, reduced])
    return names(*found)


def test_padding_is_proved_by_the_count_that_is_reduced() -> None:
    assert evaluation(11, 10) == ["padded-evaluation"]
    assert evaluation(10, 10) == []  # repeated samples were left out of the count
    assert evaluation(11, 10, 10) == []  # 11 is something else
    assert evaluation(1, 10) == []  # a mean: nobody knows of what


def padded(*facts: list[dict[str, Any]], length: int = 65, **values: Any) -> list[str]:
    """Findings and notes, these in brackets: 65 samples read as 33 and 33, and what ranks say."""
    ids = [list(range(0, 65, 2)), [*range(1, 65, 2), 0]]
    sizes = [[8, 4], [1, 1]]
    passes = [one_pass(i, backwards=0, grad=False, sizes=sizes, **values) for i in ids]
    found = of(
        *([loader(length=length), one, *more] for one, more in zip(passes, facts, strict=True))
    )
    return [f"({one.name})" if one.touches == NOTE else one.name for one in found]


def test_padding_is_proved_by_shares_of_all_samples_that_are_read() -> None:
    assert padded([reduced(17 / 33)], [reduced(20 / 33)]) == ["padded-evaluation"]
    gathers = [[{**reduced(share), "operation": "GATHER"}] for share in (17 / 33, 20 / 33)]
    assert padded(*gathers) == ["padded-evaluation"]
    assert padded([reduced(17 / 33)], [reduced(20 / 32)]) == ["(padded-evaluation)"]  # left out


def test_padding_that_is_not_proved_is_a_note_and_no_finding() -> None:
    right = [[reduced(17.0)], [reduced(20.0)]]  # divided by the length of the data
    assert padded(*right) == ["(padded-evaluation)"]
    assert padded([], []) == []  # ranks share nothing of it
    gathered = fact("gathered", of=[0, 0], trimmed=False)
    assert padded([gathered], [gathered]) == ["(padded-evaluation)"]
    trimmed = {**gathered, "trimmed": True}  # by Accelerate's gather_for_metrics
    assert padded([trimmed], [trimmed]) == []


def test_replicas_drift_only_if_they_still_do_at_the_end() -> None:
    def drift(*last: int) -> list[list[dict[str, Any]]]:
        return [[REPLICA, digest(1, w=i), digest(-1, w=one, b=5)] for i, one in enumerate(last)]

    assert names(*drift(1, 2)) == ["replicas-drift"]
    assert "from step 1 on, and at the end: w" in of(*drift(1, 2))[0].found
    assert names(*drift(1, 1)) == []
    assert names(*([*facts, large(3)] for facts in drift(1, 2))) == []  # it averages by itself
    hooked = fact("hooked", id=0)
    assert names(*([*facts, hooked] for facts in drift(1, 2))) == []


def test_replicas_of_two_groups_may_differ() -> None:
    replicas = [{**REPLICA, "group": group} for group in ([0, 1], [0, 1], [2, 3], [2, 3])]
    facts = [[one, digest(-1, w=i // 2)] for i, one in enumerate(replicas)]
    assert names(*facts) == []


def test_parameters_of_a_stage_or_of_an_own_reduction_are_no_finding() -> None:
    ends = [[SGD, digest(0, "loose", head=1), digest(-1, "loose", head=i)] for i in (1, 2)]
    assert names(*ends) == ["gradients-of-one-rank"]
    assert names(*([REPLICA, *facts] for facts in ends)) == ["parameters-outside-ddp"]
    assert names(*([*facts, large(1)] for facts in ends)) == []
    stages = fact("collectives", large=0, to_one=4)
    assert names(*([*facts, stages] for facts in ends)) == []


def test_a_step_without_reduction_explains_the_drift() -> None:
    counts = fact("counts", windows=[3, 1], steps={"0": 4}, scaled=False)
    shared = [REPLICA, window(), window(id=1, step=4, forwards=[[0, True], [0, False]]), counts]
    found = of(*([*shared, digest(-1, w=i)] for i in (1, 2)))
    assert [one.name for one in found] == ["step-without-reduction"]
    assert "1 of 4 steps" in found[0].found and "step 4" in found[0].found


def test_equal_streams_need_draws_that_were_all_equal() -> None:
    def draws(*states: int) -> list[dict[str, Any]]:
        made = enumerate(states, 1)
        return [fact("draws", of="replica", id=0, number=i, before={"torch": s}) for i, s in made]

    assert names([REPLICA, *draws(1, 2)], [REPLICA, *draws(1, 2)]) == ["equal-random-streams"]
    assert names([REPLICA, *draws(1, 2)], [REPLICA, *draws(1, 3)]) == []
    assert names([REPLICA, *draws(1)], [REPLICA, *draws(1)]) == []


@pytest.mark.parametrize(
    ("between", "first", "scaled", "found"),
    [
        ({"1": 40}, 0, False, []),
        ({"1": 40, "2": 1}, 0, False, []),
        ({"2": 40, "1": 1}, 0, False, ["schedule-too-fast"]),
        ({"1": 40}, 1, False, ["schedule-ahead"]),
        ({"1": 40}, 7, False, []),  # it goes on where a checkpoint was
        ({"1": 40}, 1, True, []),  # GradScaler may have left the optimizer's first step out
    ],
)
def test_schedules(between: dict[str, int], first: int, scaled: bool, found: list[str]) -> None:
    made = fact("scheduler", id=0, name="StepLR", optimizer=0, between=between, first=first)
    assert both(made, fact("counts", windows=[], steps={"0": 40}, scaled=scaled)) == found


def test_accumulation_that_is_not_divided() -> None:
    added = {"accumulated": True, "is_mean": True, "backwards": 4, "unchanged": True}
    assert both(SGD, window(**added)) == ["accumulation-not-divided"]
    assert both(SGD, window(**{**added, "unchanged": False})) == []  # gradients were scaled
    assert both(SGD, window(**{**added, "is_mean": False})) == []
    assert both({**SGD, "name": "AdamW"}, window(**added)) == []
    synced = {**added, "is_mean": False, "backwards": 2, "forwards": [[0, True]] * 2}
    assert both(SGD, window(**synced)) == ["reduced-at-each-micro-batch"]


def test_means_of_unequal_batches() -> None:
    def ranks(is_mean: bool) -> list[list[dict[str, Any]]]:
        sizes = ([[8, 3], [4, 1]], [[8, 3], [3, 1]])
        ids = ([*range(28)], [*range(28, 55)])
        return [
            [REPLICA, window(is_mean=is_mean), loader(), one_pass(i, sizes=one)]
            for i, one in zip(ids, sizes, strict=True)
        ]

    assert names(*ranks(True)) == ["mean-of-unequal-means"]
    assert "batch 4 has 4 and 3 samples" in of(*ranks(True))[0].found
    assert names(*ranks(False)) == []


def trained(divisor: float, factor: float = 1.0, step: int = 0, **micro: int) -> dict[str, Any]:
    batch = [micro.get("loader", 0), 0, micro.get("batch", 1)]
    return fact("trained", step=step, batch=batch, divisor=divisor, factor=factor)


def test_means_over_unequal_targets_need_one_factor() -> None:
    def ranks(one: float, other: float, factor: float = 1.0) -> list[str]:
        return names([REPLICA, trained(one)], [REPLICA, trained(other, factor)])

    assert ranks(40, 30) == ["mean-of-unequal-means"]
    assert ranks(40, 40) == ranks(4000, 4001) == []
    assert ranks(40, 30, 30 / 40) == []  # each is multiplied by its part of all targets
    hooked = [[REPLICA, fact("hooked", id=0), trained(n)] for n in (40, 30)]
    assert names(*hooked) == []
    alone = [[trained(n)] for n in (40, 30)]  # no ranks that reduce together
    assert names(*alone) == []


def test_means_over_unequal_targets_of_micro_batches() -> None:
    def one(*facts: dict[str, Any]) -> list[str]:
        return names(list(facts))

    assert one(trained(40), trained(30, batch=2)) == ["mean-of-unequal-means"]
    assert one(trained(40), trained(30, loader=1)) == []  # two tasks
    assert one(trained(40), trained(30)) == []  # two losses, or tasks, of one batch
    last = [trained(n, step=i // 2, batch=i + 1) for i, n in enumerate([8] * 9 + [3])]
    assert one(*last) == []  # 1 step of 5: the last batch of an epoch


def test_unequal_steps_are_of_ranks_that_do_not_wait() -> None:
    optimizer = {**SGD, "replicas": [0], "outside": {}}

    def ranks(one: int, other: int, *more: dict[str, Any], scaled: bool = False) -> list[str]:
        counts = [fact("counts", windows=[], steps={"0": n}, scaled=scaled) for n in (one, other)]
        return names(*([REPLICA, optimizer, *more, row] for row in counts))

    assert ranks(12, 9) == ["unequal-steps"]
    assert ranks(12, 11) == ranks(12, 12) == []  # stopped between two
    assert ranks(12, 0) == []  # that rank wrote no counts
    assert ranks(12, 9, fact("joined")) == ranks(12, 9, scaled=True) == []


def test_equal_batches_are_equal_on_all_ranks_and_unlike_each_other() -> None:
    def ranks(*tables: list[int], sent: int = 0) -> list[str]:
        return names(*(
            [REPLICA, *(fact("inputs", id=0, digests=[n], sent=sent * n) for n in table)]
            for table in tables
        ))  # fmt: skip

    assert ranks([1, 2, 3, 4], [1, 2, 3, 4]) == ["equal-batches"]
    assert ranks([1, 2, 3, 4], [1, 2, 3, 5]) == []
    assert ranks([1, 1, 1, 1], [1, 1, 1, 1]) == []  # a constant
    assert ranks([1, 2, 3], [1, 2, 3]) == []  # too few
    assert ranks([1, 2, 3, 4], [1, 2, 3, 4], sent=1) == []  # they exchange parts of a sequence


def test_a_split_of_each_rank_is_seen_by_its_subset_or_by_rows() -> None:
    def ranks(rows: list[list[list[int]]], subsets: tuple[Any, Any], **values: Any) -> list[str]:
        return names(*(
            [
                REPLICA,
                loader(subset=subset, **values),
                one_pass([2 * i + rank for i in range(16)])
                | {"rows": {str(2 * i + rank): row for i, row in enumerate(rows[rank])}},
            ]
            for rank, subset in enumerate(subsets)
        ))  # fmt: skip

    apart = [[[100 * rank + i, 7] for i in range(16)] for rank in (0, 1)]
    assert ranks(apart, (1, 1)) == ranks(apart, (None, None)) == []
    assert ranks(apart, (1, 2)) == ["split-of-each-rank"]
    assert ranks(apart, (1, 2), sampler="RandomSampler") == []  # each rank has a part of its own
    assert ranks(apart, (1, 2), replicas=1) != ["split-of-each-rank"]
    twice = [[[i, 7] for i in range(16)]] * 2  # each sample is in the data twice
    assert ranks(twice, (None, None)) == []


def test_a_split_of_each_rank_is_seen_by_numbers_that_are_other_samples() -> None:
    def ranks(*tables: list[int]) -> list[str]:
        """One table for each rank: the row of each number, over the epochs."""
        return names(*(
            [REPLICA, loader(), *(
                one_pass(ids, number) | {"rows": {str(i): [table[i]] for i in ids}}
                for number, ids in enumerate((evens, odds)[:: 1 - 2 * rank])
            )]
            for rank, table in enumerate(tables)
        ))  # fmt: skip

    evens, odds, ordered = list(range(0, 16, 2)), list(range(1, 16, 2)), list(range(16))
    assert ranks(ordered, ordered[::-1]) == ["split-of-each-rank"]
    assert ranks(ordered, ordered) == []
    assert ranks(ordered, [*ordered[:9], *ordered[:8:-1]]) == []  # 6 numbers: too few
    assert ranks(ordered, [100 + i for i in ordered]) == []  # changed by augmentation
    assert ranks([0, *ordered[:15]], ordered) == []  # the data have equal rows


def test_a_sum_of_losses_with_repeated_samples_is_proved_by_what_is_given() -> None:
    def ranks(*given: float, counts: tuple[int, int] = (33, 33)) -> list[str]:
        losses = [{**means(0.5, counts=[n]), "is_sum": True} for n in counts]
        rows = [{**reduced(value), "operation": "GATHER"} for value in given]
        return padded(*([*pair] for pair in zip(losses, rows, strict=True)))

    assert ranks(16.5, 16.5) == ranks(0.5, 0.5) == ["padded-evaluation"]
    assert ranks(16.5, 16.0) == ["(padded-evaluation)"]
    assert ranks(16.5, 16.0, counts=(33, 32)) == ["(padded-evaluation)"]  # one was left out


def test_the_causes_of_a_drift_are_those_that_the_facts_show() -> None:
    optimizer = {**SGD, "replicas": [0], "outside": {}}

    def drift(forwards: int, rates: list[float], **values: Any) -> str:
        facts = []
        for i, rate in enumerate(rates):
            counts = fact("counts", windows=[], steps={"0": 3}, scaled=False, rates={"0": [rate]})
            last = {**digest(-1, forwards=forwards, w=i), **values}
            facts.append([REPLICA, optimizer, counts, last])
        (drifting,) = of(*facts)
        assert drifting.name == "replicas-drift"
        return f"{drifting.found} | {drifting.fix}"

    assert "no cause was seen | look" in drift(3, [0.1, 0.1])
    rates = drift(3, [0.1, 0.2])
    assert "the learning rates of the ranks are 0.1 and 0.2 at the end | step" in rates
    assert "no forward of the DDP ran in training, for 3 steps | call" in drift(0, [0.1, 0.1])
    assert "only 2 forwards of the DDP ran" in drift(2, [0.1, 0.1])
    unreduced = drift(3, [0.1, 0.1], unreduced=["w"])
    assert "DDP does not reduce w" in unreduced and "| wrap the model" in unreduced
    assert "no cause" not in drift(2, [0.1, 0.2])


def test_a_library_that_steps_the_schedule_does_it_on_purpose() -> None:
    steps = {"name": "StepLR", "optimizer": 0, "between": {"2": 9}, "first": 0}
    assert both(fact("scheduler", id=0, **steps, wrapped=False)) == ["schedule-too-fast"]
    assert both(fact("scheduler", id=0, **steps, wrapped=True)) == []


def means(*values: float, counts: list[int]) -> dict[str, Any]:
    pairs = {"values": list(values), "counts": counts}
    return fact("means", loader=0, number=0, name="cross_entropy", **pairs)


def reduced(*before: float) -> dict[str, Any]:
    told = {"before": list(before), "values": [], "name": "all_reduce", "operation": "SUM"}
    return fact("reduced", after=[0, 0], **told)


def test_a_mean_of_batch_means_is_proved_by_what_is_reduced() -> None:
    """Batches of 8, 8 and 1: the mean of 1, 1 and 4 is 2, and over all 17 it is 1.176."""
    taken, even = means(1.0, 1.0, 4.0, counts=[8, 8, 1]), means(1.0, 1.0, 4.0, counts=[8, 8, 8])
    assert both(taken, reduced(2.0)) == ["mean-of-means"]
    assert both(taken, reduced(6.0, 3.0)) == ["mean-of-means"]
    assert "it 2; over all of them it is 1.17647" in of([taken, reduced(2.0)])[0].found
    assert both(taken, reduced(20.0, 17.0)) == []  # sums and counts
    assert both(taken, reduced(20 / 17)) == []
    assert both(even, reduced(2.0)) == []
    assert names([taken, reduced(2.0)], [taken, reduced(1.5)]) == []  # something else
    largest = {**reduced(2.0), "operation": "MAX"}
    assert both(taken, largest) == []
    equal = means(2.0, 2.0, 2.0, counts=[8, 8, 1])
    assert both(equal, reduced(2.0)) == []
    more = means(1.0, 1.0, 1.0, counts=[8, 8, 8])  # exact on each rank, of 17 and of 24 samples
    assert names([taken, reduced(20 / 17)], [more, reduced(1.0)]) == ["mean-of-means"]


def test_a_mean_of_batch_means_is_proved_by_what_is_printed() -> None:
    taken = means(0.7311, 0.6502, 0.9104, counts=[8, 8, 1])

    def printed(text: str) -> list[str]:
        return names([taken, fact("print", text=text, digest=1)])

    assert printed("Test: loss 0.76390") == ["mean-of-means"]
    assert printed(f"Test: loss {(8 * 0.7311 + 8 * 0.6502 + 0.9104) / 17:.5f}") == []
    assert printed("Test: loss 0.76") == []  # too few digits to prove anything
    assert printed("v10.76390") == printed("Test: loss 0.763901") == []


def test_a_mean_times_the_ranks_is_proved_by_what_is_gathered_or_printed() -> None:
    values, counts = (0.7311, 0.6502, 0.9104), [8, 8, 8]

    def gathered(*factors: float) -> list[str]:
        given = [[factor * value for value in values] for factor in factors]
        return names(*([{**means(*values, counts=counts), "gathered": g}] for g in given))

    def printed(value: float, after: list[int] | None) -> list[str]:
        line = fact("print", text=f"eval {value:.5f}", digest=1, after=after)
        return names([means(*values, counts=counts), line], [means(*values, counts=counts)])

    assert gathered(2, 2) == ["mean-times-ranks"]
    assert gathered(2, 1) == gathered(1, 1) == gathered(0.5, 0.5) == []
    mean = sum(values) / 3
    assert printed(2 * mean, [0, 0]) == ["mean-times-ranks"]
    assert printed(mean, [0, 0]) == printed(2 * mean, [1, 0]) == printed(2 * mean, None) == []


def test_a_mean_of_the_means_of_ranks_is_proved_by_what_is_printed() -> None:
    taken = [means(0.71, 0.65, counts=[8, 8]), means(0.31, 0.95, counts=[8, 1])]
    own = (0.71 + 0.65) / 2, (8 * 0.31 + 0.95) / 9

    def printed(value: float) -> list[str]:
        line = fact("print", text=f"loss {value:.5f}", digest=1, after=[0, 0])
        return names([taken[0], line], [taken[1]])

    assert printed(sum(own) / 2) == ["mean-of-means"]
    assert printed((16 * own[0] + 9 * own[1]) / 25) == []


def test_shares_of_ranks_that_are_averaged() -> None:
    """17 of 33 and 21 of 32 right: 38 of 65."""

    def ranks(one: float, other: float, right: int = 32) -> list[str]:
        facts = []
        for count, given in ((33, one), (right, other)):
            taken = one_pass(list(range(count)), backwards=0, grad=False)
            facts.append([loader(length=65), taken, reduced(given)])
        return names(*facts)

    assert ranks(17 / 33, 21 / 32) == ["mean-of-means"]
    assert ranks(100 * 17 / 33, 100 * 21 / 32) == ["mean-of-means"]
    assert ranks(17 / 33, 21 / 33, right=33) == []  # as many on both
    assert ranks(17 / 65, 21 / 65) == []  # over all of them already
    assert ranks(17.0, 21.0) == []  # sums
    assert ranks(0.51739, 0.65802) == []  # a loss: nobody knows of what
    assert ranks(0.5, 0.25) == []


def draws_of_workers(seed: Any, workers: int = 2, passes: int = 2) -> list[dict[str, Any]]:
    """Facts of workers that draw in the states `seed(pass, worker, number)`."""
    return [
        fact("worker", loader=0, worker=w, number=n, before={"numpy.random": seed(p, w, n)})
        | {"pass": p}
        for p in range(passes)
        for w in range(workers)
        for n in range(3)
    ]


def test_workers_draw_from_one_stream() -> None:
    def found(*seeds: Any, **more: Any) -> list[str]:
        facts = []
        for rank, seed in enumerate(seeds):
            taken = one_pass(list(range(16 * rank, 16 * rank + 16)))
            drawn = draws_of_workers(seed, **more)
            facts.append([REPLICA, loader(workers=2, seeded=True), taken, *drawn])
        return names(*facts)

    def own(rank: int) -> Any:
        return lambda p, w, n: 1000 * rank + 100 * p + 10 * w + n

    assert found(own(0), own(1)) == []
    assert found(own(0), own(0)) == ["equal-random-streams"]  # ranks
    alike = [lambda p, w, n: 100 * p + n, lambda p, w, n: 1000 + 100 * p + n]
    assert found(*alike) == ["equal-random-streams"]  # workers
    each = [lambda p, w, n: 10 * w + n, lambda p, w, n: 1000 + 10 * w + n]
    assert found(*each) == ["same-draws-each-epoch"]
    assert found(*each, passes=1) == []
    assert found(*(lambda p, w, n, r=r: 1000 * r + n if n else 7 for r in (0, 1)), workers=1) == [
        "same-draws-each-epoch"
    ]  # the first draw alone is equal on ranks


def test_files_and_lines_of_all_ranks() -> None:
    save = fact("file", how="save", path="/run/weights.pt", at=[1, 0, 0])
    assert both(save, {**save, "how": "open"}) == ["checkpoint-of-all-ranks"]
    assert names([save], []) == []
    assert both(fact("print", text="epoch 1", digest=1)) == ["printed-by-all-ranks"]
    assert names(*([fact("print", text=f"rank {i}", digest=i)] for i in range(2))) == []


def test_a_file_is_read_with_no_collective_since_it_was_written() -> None:
    def found(written: Any, read: Any, *more: dict[str, Any]) -> list[str]:
        path = {"path": "/run/data.bin", "where": ["/train.py", 3]}
        writer = [fact("file", how="open", at=written, **path)]
        reader = [fact("file", how="read", at=read, **path), *more]
        return names(writer, reader)

    assert found([2, 0, 0], [2, 0, 0]) == ["read-while-written"]
    assert found([2, 0, 0], [3, 0, 0]) == found([3, 0, 0], [2, 0, 0]) == []
    assert found(None, None) == found([2, 0, 0], [2, 0, 0], fact("lock")) == []


def test_a_line_that_the_first_rank_of_each_node_prints() -> None:
    def on(node: int, local: int, *facts: dict[str, Any]) -> list[dict[str, Any]]:
        return [fact("process", local_rank=str(local), group_rank=str(node)), *facts]

    line = fact("print", text="epoch 1", digest=1)
    firsts = [on(0, 0, line), on(0, 1), on(1, 0, line), on(1, 1)]
    assert names(*firsts) == ["printed-once-per-node"]
    assert names(firsts[0], firsts[1], on(1, 0), firsts[3]) == []
    assert names(firsts[0], on(0, 1, {**line, "digest": 2}), *firsts[2:]) == []
    assert names(on(0, 0, line), on(1, 0, line)) == ["printed-by-all-ranks"]


def test_facts_are_read_by_rank_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    def write(name: str, *facts: dict[str, Any], end: str = "") -> None:
        text = "".join(json.dumps(one) + "\n" for one in facts) + end
        (tmp_path / f"{name}.jsonl").write_text(text)

    process = {"fact": "process", "rank": "0"}
    write("10", process)  # a launcher of its own, which takes part in no group
    write("11", process, {"fact": "world", "rank": 1}, end='{"fact": "pri')
    write("12", process, {"fact": "world", "rank": 0})
    ranks = read_ranks(tmp_path)
    assert [(one.rank, len(one.facts)) for one in ranks] == [(0, 2), (1, 2)]


def test_without_facts_there_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"imported torch(.|\n)*Keras, write a task"):
        watched_in(tmp_path)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([], "no optimizer of torch made a step, so no training was watched"),
        ([window()], "each may train a copy of its own"),
        ([window(), {"fact": "world", "rank": 0}], ""),
    ],
)
def test_a_verdict_says_if_the_ranks_did_not_train_together(
    facts: list[dict[str, Any]], words: str, tmp_path: Path
) -> None:
    """As torch's DDP example, which ends without two GPUs; or a script of one process."""
    for rank in range(2):
        process = fact("process", rank=rank, local_rank=str(rank), group_rank="0")
        lines = [process, *({**f, "rank": rank} for f in facts)]
        (tmp_path / f"{rank}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    watched = watched_in(tmp_path)
    assert (
        words in watched.summary and words in str(watched) and words in watched.to_data()["doubt"]
    )
    assert bool(watched.doubt) == bool(words)


def test_what_a_person_reads(tmp_path: Path) -> None:
    found = ScriptFinding("a-fault", "result", (str(tmp_path / "train.py"), 3), "x", "y", "z")
    text = str(Watched(2, (found,), ("Loaders.install: gone",)))
    assert text.splitlines()[1:] == [
        "  found:  x",
        "  effect: y",
        "  fix:    z",
        "not watched: Loaders.install: gone",
        "1 finding on 2 ranks, but not all was watched: please report the lines above",
    ]
    assert str(Watched(2, (), ())) == "nothing found on 2 ranks"
    unsure = Watched(2, (), ("x: y",))
    assert unsure.summary == "undecided: nothing found, but not all was watched"
    assert str(unsure).splitlines()[-1].startswith("undecided: nothing found on 2 ranks, but not")
    assert (unsure.decided, unsure.to_data()["decided"], Watched(2, (), ()).decided) == (
        False,
        False,
        True,
    )
    note = ScriptFinding("padded-evaluation", NOTE, None, "x", "y", "z")
    noted = Watched(2, (), (), (note,))
    assert str(noted).splitlines()[0] == "(no line of the script): padded-evaluation (note)"
    assert str(noted).splitlines()[-1] == "nothing found on 2 ranks" and noted.decided
    assert text.splitlines()[0].endswith("train.py:3: a-fault (result)")
    assert found.to_data()["line"] == 3

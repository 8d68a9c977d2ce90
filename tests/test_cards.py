"""The cards: golden bytes of each strategy, and what cannot be asked of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from allranks.catalog import ENGINES, REDUCERS, STRATEGIES
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.strategies.card import Exact, Option, Picked, Reference, Workload
from allranks.strategies.cards import CARDS
from allranks.strategies.choice import Choice, parse_choice
from allranks.strategies.reduction_tree import PAIRS_LIMIT_BYTES
from allranks.strategies.resolve import TO_COME, card_for, resolved_strategy

RANKS = (1, 2, 3, 4, 8)
GRADIENTS, TALLY = 3200, 160  # bytes; 3360 together, 1760 with 800 gradients of 16 bit
SHAPES = (((20, 40),),)
ABLE = (
    "use single or ddp or zero1 or zero2 or fsdp or hsdp or model-parallel or gpipe or 1f1b or "
    "interleaved or zero-bubble or mesh"
)
CUT = 800, 2400, GRADIENTS, TALLY  # weights of the root and of the units beside them
# 8 shards: roots of the busiest rank are 1, 1, 2, 1, 1
GOLDEN: dict[tuple[str, str], tuple[int, ...]] = {
    ("single", ""): (0, 0, 0, 0, 0),
    ("dp", ""): (0, 0, 0, 0, 0),
    ("model-parallel", ""): (0, 0, 0, 0, 0),
    ("independent", ""): (0, 0, 0, 0, 0),
    ("ddp-plain", ""): (0, 3360, 4480, 5040, 5880),
    ("ddp", "mean"): (0, 3360, 4480, 5040, 5880),
    ("ddp", "tree"): (0, 3360, 6720, 6720, 10080),
    ("ddp", "fp16"): (0, 1760, 2347, 2640, 3080),
    ("ddp", "bf16"): (0, 1760, 2347, 2640, 3080),
    ("ddp", "ring"): (0, 3360, 4480, 5040, 5880),
    ("ddp", "halving-doubling"): (0, 3360, 6720, 5040, 5880),
    ("ddp", "binary-tree"): (0, 3360, 6720, 6720, 10080),
    ("ddp", "star"): (0, 3360, 6720, 10080, 23520),
    ("ddp", "hierarchical"): (0, 3360, 4480, 5040, 5880),  # all of them one group
    ("ddp", "top-k"): (0, 512, 1024, 1536, 3584),  # 64 numbers of 4 + 1.5 bytes; the tally
    ("ddp", "two-bit"): (0, 360, 720, 1080, 2520),
    ("ddp", "demo"): (0, 336, 672, 1008, 2352),  # 32 of the one block, 4 + 1.5 bytes; the tally
    ("ddp", "power-sgd"): (0, 400, 533, 600, 700),  # 20 + 40 numbers for 20 x 40; the tally
    ("ddp", "one-bit"): (0, 480, 661, 720, 952),  # 20 columns of 8 + 8 bytes; the tally
    ("ddp", "n-bit"): (0, 720, 997, 1080, 1456),  # of 20 + 8 bytes
    ("zero1", "mean"): (0, 3360, 4480, 5040, 5880),
    ("zero1", "tree"): (0, 3360, 6720, 5120, 6080),
    ("zero2", "mean"): (0, 4960, 6613, 7440, 8680),  # two backward passes
    ("zero2", "tree"): (0, 3360, 6720, 5120, 6080),
    ("fsdp", ""): (0, 4560, 6080, 6840, 7980),
    ("fsdp", "tree"): (0, 4560, 6187, 6920, 8180),
    ("fsdp", "top-k"): (0, 3312, 4650, 5496, 7644),  # weights; codes of a part to each other rank
    ("fsdp", "two-bit"): (0, 3064, 4090, 4608, 5404),
    ("hsdp", ""): (0, 4560, 5680, 6240, 7080),
    ("hsdp", "top-k"): (0, 4560, 4789, 4992, 5736),  # codes of a half to each other group of 2
    ("hsdp", "demo"): (0, 4560, 4701, 4816, 5208),  # 32 of the block of 10 x 40
    ("hsdp", "two-bit"): (0, 4560, 4665, 4744, 4992),
    ("hsdp", "tree"): (0, 4560, 7387, 9520, 16880),
    **dict.fromkeys(
        [(n, "") for n in ("gpipe", "1f1b", "interleaved", "zero-bubble")],
        (0, 3360, 4480, 5040, 5880),
    ),
    **dict.fromkeys([(n, "") for n in ("mirrored", "central-storage", "tpu")], (0, 0, 0, 0, 0)),
    ("multi-worker-mirrored", ""): (0, 3360, 4480, 5040, 5880),
    ("parameter-server", ""): (6720, 6720, 6720, 6720, 6720),
    ("tensor", ""): (0, 2160, 2880, 3240, 3780),
    ("branches", ""): (0, 1760, 2347, 2640, 3080),
    ("context", ""): (0, 5200, 6720, 7480, 8620),
    ("mesh", ""): (0, 160, 213, 240, 280),  # one of each axis: nothing but the tally
    ("decoupled", ""): (210, 420, 630, 840, 1680),  # weights and buffers to each, every 16 steps
    ("expert", ""): (0, 3360, 4480, 5040, 5880),  # of which no row goes to another rank
    ("ps", ""): (3360, 6720, 10080, 13440, 26880),  # its weights to each worker
    ("local-sgd", ""): (0, 204, 271, 305, 356),  # every 16 steps, those of the next one every 12
    ("slowmo", ""): (0, 271, 362, 407, 475),
    ("block-momentum", ""): (0, 204, 271, 305, 356),
    ("diloco", ""): (0, 65, 87, 98, 114),
    ("sparse-loco", ""): (0, 5, 9, 13, 27),  # messages of 100 bytes
}
MESSAGES = {
    **dict.fromkeys(("zero1", "zero2"), (GRADIENTS, TALLY)),
    **dict.fromkeys(("fsdp", "hsdp"), CUT),
    "tensor": (1600, 800, GRADIENTS, TALLY),  # activations summed, gathered
    "branches": (1600, 800, TALLY),  # what branches return, what comes back
    "context": (1600, 400, 200, 640, GRADIENTS + TALLY),  # by all-to-all, gathered, summed, passed
    "mesh": (
        0,
        1600,
        800,
        GRADIENTS,
        0,
        TALLY,
        TALLY,
    ),  # and before them what crosses between stages
    "expert": (0, GRADIENTS + TALLY, 1600),  # rows, what is whole, experts
    **dict.fromkeys(("local-sgd", "slowmo", "block-momentum", "diloco"), (0, GRADIENTS, 0, 56)),
    "sparse-loco": (0, 0, 100, 56),
}
"""Of strategies whose tally is a message of its own."""


def bytes_of(name: str, reduce: str, ranks: int, shards: int = 8) -> int:
    options: dict[str, Any] = CARDS[name].read_options({"reduce": reduce} if reduce else {})
    messages = MESSAGES.get(name, (GRADIENTS + TALLY,))
    work = Workload(messages, ranks, shards, gradients=GRADIENTS // 4, tally=TALLY, shapes=SHAPES)
    if name == "zero2":
        work = replace(work, passes=2)
    return CARDS[name].bytes_sent(work, options)


@pytest.mark.parametrize(("name", "reduce"), GOLDEN, ids="-".join)
def test_golden_bytes_of_a_step(name: str, reduce: str) -> None:
    assert tuple(bytes_of(name, reduce, ranks) for ranks in RANKS) == GOLDEN[name, reduce]


def test_every_strategy_has_golden_bytes_a_card_and_a_class() -> None:
    assert {name for name, _ in GOLDEN} == set(CARDS)
    assert set(CARDS) == {name for table in STRATEGIES.values() for name in table}
    assert set(STRATEGIES) == set(ENGINES)
    assert {reduce for name, reduce in GOLDEN if name == "ddp"} == set(REDUCERS)
    (choices,) = (o.choices for o in CARDS["ddp"].options if o.name == "reduce")
    assert set(choices) == set(REDUCERS)


@pytest.mark.parametrize(("reduce", "kind"), [("tree", Exact), ("bf16", Reference)])
def test_the_reducer_decides_what_ddp_promises(reduce: str, kind: type) -> None:
    card = CARDS["ddp"]
    assert isinstance(card.guarantee_of(card.read_options({})), Exact)
    assert isinstance(card.guarantee_of(card.read_options({"reduce": reduce})), kind)


def test_the_bytes_of_the_tree_follow_its_roots() -> None:
    assert bytes_of("ddp", "tree", 5) == 5376  # runs of 2 2 2 1 1 shards: one root each
    assert bytes_of("ddp", "tree", 2, shards=6) == 5040  # 0 1, 2 | 3, 4 5: two roots each
    assert bytes_of("ddp", "tree", 7, shards=7) == 5760


def test_layers_cut_over_a_tensor_axis_halve_the_ranks_that_gather() -> None:
    """2 shards of 2 parts: half of 8800 gathered and scattered, the tally, half of 4000 along."""
    work = Workload((*CUT, 0, 1600, 800), 4, 8)
    options = CARDS["fsdp"].read_options({"tensor": "2"})
    assert CARDS["fsdp"].bytes_sent(work, options) == 4400 + 240 + 2000


def test_a_large_message_goes_through_the_tree_in_chunks_where_that_is_less() -> None:
    def sent(ranks: int, message: int) -> int:
        return CARDS["ddp"].bytes_sent(Workload((message,), ranks, 8), options)

    options = CARDS["ddp"].read_options({"reduce": "tree"})
    limit = PAIRS_LIMIT_BYTES
    assert (sent(4, limit), sent(8, limit)) == (2 * limit, 3 * limit)
    assert (sent(4, 2 * limit), sent(8, 2 * limit)) == (3 * limit, 3.5 * limit)
    assert sent(2, 100 * limit) == 100 * limit


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(RequestError) as refused:
        card_for(Choice("ddp-plane"))
    assert refused.value.do.startswith(
        "did you mean 'ddp-plain'? known: 1f1b, block-momentum, branches, central-storage"
    )


@pytest.mark.parametrize(
    ("text", "ranks", "bitwise", "wanted"),
    [
        ("ddp", 4, False, "ddp"),
        ("ddp:bucket_mb=1", 4, False, "ddp:bucket_mb=1"),
        ("ddp", 4, True, "ddp:reduce=tree"),
        ("ddp(bucket_mb=1)", 4, True, "ddp:bucket_mb=1,reduce=tree"),
        ("ddp:reduce=tree", 4, True, "ddp:reduce=tree"),
        ("single", 1, True, "single"),
        ("independent", 4, False, "independent"),
    ],
)
def test_bitwise_asks_for_the_tree(text: str, ranks: int, bitwise: bool, wanted: str) -> None:
    assert str(resolved_strategy(text, ranks=ranks, bitwise=bitwise)) == wanted


@pytest.mark.parametrize(
    ("text", "ranks", "bitwise", "do"),
    [
        ("single", 2, False, "--ranks 1, or --strategy ddp for 2 ranks"),
        ("ddp-plain", 2, True, ABLE),
        ("independent", 2, True, ABLE),
        ("ddp:reduce=mean", 2, True, "leave reduce out, or drop --bitwise"),
        ("ddp:reduce=bf16", 2, True, "leave reduce out, or drop --bitwise"),
        ("ddp:bucket_mb=0", 2, False, "for example bucket_mb=25.0"),
        ("ddp:bucket=1", 2, False, "did you mean 'bucket_mb'? known: bucket_mb, late, reduce"),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(
    text: str, ranks: int, bitwise: bool, do: str
) -> None:
    with pytest.raises(RequestError) as refused:
        resolved_strategy(text, ranks=ranks, bitwise=bitwise)
    assert refused.value.do == do


@pytest.mark.parametrize("name", [name for name, card in CARDS.items() if card.many_ranks])
def test_every_strategy_is_resolved_on_nodes_as_on_one_machine(name: str) -> None:
    def found(per_node: int | None) -> str:
        return str(resolved_strategy(name, ranks=4, bitwise=False, per_node=per_node))

    assert found(2) == found(1) == found(None)


def test_a_job_has_its_strategy_as_a_value() -> None:
    spec = Job(strategy="ddp:bucket_mb=1,reduce=tree", ranks=3).strategy_spec
    assert (spec.name, spec.process_set.size, spec.devices_of_a_rank) == ("ddp", 3, 1)
    assert spec.options == {"reduce": Picked("tree"), "bucket_mb": 1.0, "late": Picked("0")}
    assert spec.adds_shards and not Job(strategy="ddp").strategy_spec.adds_shards
    assert not Job(strategy="single").strategy_spec.adds_shards
    with pytest.raises(TypeError):
        spec.options["bucket_mb"] = 2.0  # type: ignore[index]
    assert Job(strategy="dp:replicas=3").strategy_spec.devices_of_a_rank == 3
    assert isinstance(Job(strategy="ddp:reduce=bf16").strategy_spec.guarantee, Reference)


@pytest.mark.parametrize(("ranks", "name"), [(1, "single"), (2, "ddp")])
def test_without_a_name_it_is_the_one_of_the_engine(ranks: int, name: str) -> None:
    assert Job(ranks=ranks).strategy_spec.name == name


ORDERED = (
    Option("order", "ranks", "how it adds", {"ranks": (), "shards": ()}),
    Option("strict", False, "wait for all"),
)


def test_the_card_says_what_bitwise_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option has a name of its own to the one who resolves: here none is called `reduce`."""
    wanted = {"order": "shards", "strict": "true"}
    card = replace(CARDS["ddp"], name="made-up", options=ORDERED, bitwise_options=wanted)
    monkeypatch.setitem(CARDS, "made-up", card)
    found = resolved_strategy("made-up:strict=YES", ranks=2, bitwise=True)
    assert str(found) == "made-up:strict=true,order=shards"
    assert str(resolved_strategy("made-up", ranks=2, bitwise=False)) == "made-up"
    for given in ("order=ranks", "strict=no"):
        with pytest.raises(RequestError) as refused:
            resolved_strategy(f"made-up:{given}", ranks=2, bitwise=True)
        assert refused.value.found == given
    assert refused.value.do == "leave strict out, or drop --bitwise"


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed:x=1"])
def test_a_strategy_that_is_to_come_is_not_taken_for_another(name: str) -> None:
    with pytest.raises(RequestError) as refused:
        card_for(parse_choice(name))
    assert "which this version does not have yet" in refused.value.found
    assert "did you mean" not in str(refused.value) and "ddp" in refused.value.do


def test_copies_of_experts_exchange_their_gradients_too() -> None:
    options = CARDS["expert"].read_options({"replicas": "2"})
    work = Workload((800, GRADIENTS + TALLY, 1600), 4, 8)
    assert CARDS["expert"].bytes_sent(work, options) == 800 + 5040 + 1600


def test_another_name_of_a_strategy_is_told() -> None:
    with pytest.raises(RequestError) as refused:
        card_for(parse_choice("zero3"))
    assert refused.value.do == "--strategy fsdp"


def test_no_strategy_that_is_there_is_said_to_come() -> None:
    assert not set(CARDS) & set(TO_COME)


def test_every_number_of_a_card_says_its_bound() -> None:
    """One without would be taken at any value, and fail in a rank."""
    for card in CARDS.values():
        for option in card.options:
            if isinstance(option.default, (int, float)) and not isinstance(option.default, bool):
                assert (option.at_least, option.above) != (None, None), (card.name, option.name)


def test_what_is_always_refused_promises_nothing() -> None:
    assert "equal to nothing: it is refused" in str(CARDS["tpu"].guarantee)


@pytest.mark.parametrize(
    ("options", "unused", "do"),
    [
        ("staleness=1", "mode=sync", "mode=async, or"),
        ("mode=async,backup=1", "mode=async", "mode=sync, or"),
        ("backup=1,mode=delta", "mode=delta", "mode=sync, or"),
        ("mode=delta,ramp_from=0.5", "ramp=none", "ramp=staircase, or"),
        ("mode=delta,ramp_over=4", "ramp=none", "ramp=staircase, or"),
        ("rate=staleness-aware", "mode=sync", "mode=async, or"),
    ],
)
def test_an_option_that_others_leave_unused_is_refused_before_anything_starts(
    options: str, unused: str, do: str
) -> None:
    with pytest.raises(RequestError) as refused:
        resolved_strategy(f"ps:{options}", ranks=2, bitwise=False)
    assert refused.value.found.startswith(unused) and refused.value.do.startswith(do)
    for used in ("mode=async,rate=staleness-aware", "mode=delta,ramp=line,ramp_from=0.5"):
        resolved_strategy(f"ps:{used}", ranks=2, bitwise=False)

"""Fully sharded: equal bits, what `fully_shard` can get wrong, checkpoints, faults, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from allranks.errors import AllranksError, RequestError
from conftest import Train
from test_check import Check, check
from test_every_strategy import difference

__all__ = ["check"]

DEEP = "fsdp_tasks:Deep"
FP64: dict[str, Any] = {"precision": "fp64"}


@pytest.mark.slow
def test_ranks_with_fewer_chunks_of_an_evaluation_pass_for_the_others(train: Train) -> None:
    """Ten samples by three are four chunks, for three ranks."""
    one, three = (
        train("contract_tasks:Images", strategy="fsdp", ranks=ranks, precision="fp64", steps=1)
        for ranks in (1, 3)
    )
    assert three.summary["eval"] == pytest.approx(one.summary["eval"], rel=1e-10)


@pytest.mark.slow(most=1)
@pytest.mark.cases("task", ["Words", "Uneven"], exhaustive=["Images", "Experts", "Pairs"])
def test_the_bits_of_one_process(task: str, train: Train) -> None:
    def digest(strategy: str, ranks: int) -> str:
        program = f"contract_tasks:{task}"
        result = train(program, strategy=strategy, ranks=ranks, steps=6, bitwise=True)
        return str(result.summary["weights_sha256"])

    wanted = digest("single", 1)
    assert digest("ddp", 2) == wanted
    for strategy, ranks in (("fsdp", 3), ("hsdp:shard=2", 4)):
        assert digest(strategy, ranks) == wanted, strategy


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_bits_of_one_process_in_16_bits_and_several_passes(
    precision: str, train: Train
) -> None:
    common: dict[str, Any] = {"precision": precision, "steps": 6, "bitwise": True, "micro_batch": 2}
    runs = (
        train(DEEP, strategy=strategy, ranks=ranks, **common)
        for strategy, ranks in (("single", 1), ("ddp", 2), ("fsdp", 3))
    )
    assert len({run.summary["weights_sha256"] for run in runs}) == 1


@pytest.mark.slow(most=2)
@pytest.mark.cases(
    ("precision", "strategy", "setting", "flags"),
    [
        ("bf16", "fsdp", "twice=yes", {}),
        ("fp16", "hsdp:shard=2", "twice=no", {}),
        ("fp32", "fsdp", "twice=no", {}),
    ],
    exhaustive=[
        ("bf16", "fsdp", "twice=no", {"micro_batch": 3}),
        ("bf16", "fsdp:offload=cpu", "twice=no", {}),
    ],
)
def test_copies_in_16_bits_are_freed_with_the_weights(
    precision: str, strategy: str, setting: str, flags: dict[str, Any], train: Train
) -> None:
    """Of trained and frozen ones, and of views of both: the model itself looks, and raises."""
    ranks = 4 if strategy.startswith("hsdp") else 2
    flags = {"precision": precision, "steps": 2, **flags}
    train("fsdp_tasks:Products", setting, strategy=strategy, ranks=ranks, **flags)


@pytest.mark.slow(most=1)
@pytest.mark.thinned(1, ("precision", ["bf16", "fp16"]), ("again", [False, True]))
def test_copies_that_are_made_again_have_the_bits_of_one_process(
    precision: str, again: bool, train: Train
) -> None:
    common: dict[str, Any] = {"precision": precision, "steps": 4, "bitwise": True, "micro_batch": 2}
    common["activation_checkpointing"] = again
    runs = (
        train("fsdp_tasks:Products", "counts=no", strategy=strategy, ranks=ranks, **common)
        for strategy, ranks in (("single", 1), ("fsdp", 3))
    )
    assert len({run.summary["weights_sha256"] for run in runs}) == 1


CASES: dict[str, tuple[str, int, tuple[str, ...], dict[str, Any]]] = {
    "several passes": ("fsdp", 3, (), {"micro_batch": 3}),
    "activations computed again": ("fsdp", 2, (), {"activation_checkpointing": True}),
    "weights kept after forward": ("fsdp:reshard=false", 2, (), {"micro_batch": 5}),
    "an average": ("fsdp", 2, ("ema=0.9",), {}),
    "one unit": ("fsdp", 2, ("units=none",), {}),
    "groups of two": ("hsdp:shard=2", 4, (), {"micro_batch": 3}),
    "LARS": ("fsdp", 2, ("optimizer_name=lars",), {}),
    "LAMB": ("fsdp", 3, ("optimizer_name=lamb",), {}),
    "parts on the host": ("fsdp:offload=cpu", 3, ("ema=0.9",), {"micro_batch": 3}),
    "groups of two, parts on the host": ("hsdp:shard=2,offload=cpu", 4, (), {}),
    "layers cut too": ("fsdp:tensor=2", 4, (), {}),
    "layers cut by three, over one shard": ("fsdp:tensor=3", 3, ("ema=0.9",), {}),
    "layers cut too, several passes": (
        "fsdp:tensor=2",
        6,
        (),
        {"micro_batch": 3, "activation_checkpointing": True},
    ),
    "Adafactor": ("hsdp:shard=2", 4, ("optimizer_name=adafactor",), {}),
}
OTHERS_HAVE = {  # cases for --exhaustive alone, and the case that tries the same beside more
    "several passes": "groups of two",
    "activations computed again": "layers cut too, several passes",
    "an average": "parts on the host",
    "LARS": "LAMB",  # which looks at whole tensors too
    "layers cut too": "layers cut too, several passes",
}


@pytest.mark.slow(most=4)
@pytest.mark.cases("case", sorted(CASES.keys() - OTHERS_HAVE), exhaustive=list(OTHERS_HAVE))
def test_blocks_numbers_tied_weights_and_optimizers_of_whole_tensors(
    case: str, train: Train
) -> None:
    strategy, ranks, settings, flags = CASES[case]
    wanted = train(DEEP, *settings, strategy="single", steps=6, **FP64)
    found = train(DEEP, *settings, strategy=strategy, ranks=ranks, steps=6, **FP64, **flags)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) < 1e-10
    assert found.summary["eval"] == pytest.approx(wanted.summary["eval"], rel=1e-10)
    promised = found.summary["card_bytes_per_step"]
    sent = found.summary["sent_bytes"]["gradients"] / found.summary["steps"]
    if "micro_batch" in flags:  # the last batch of an epoch goes through in fewer passes
        assert 0.85 * promised < sent <= promised
    elif case == "Adafactor":  # the card is of the busiest rank, the record of the leader
        assert 0.98 * promised < sent < promised
    else:
        assert promised == pytest.approx(sent, abs=1)


@pytest.mark.slow(most=2)
@pytest.mark.cases(
    ("first", "second"),
    [
        (("ddp", 3), ("hsdp:shard=2", 4)),
        (("fsdp:tensor=3", 3), ("fsdp", 2)),
        (("fsdp:tensor=2,offload=cpu", 4), ("fsdp:offload=cpu", 2)),
    ],
    exhaustive=[
        (("fsdp", 4), ("fsdp", 2)),
        (("hsdp:shard=2", 4), ("ddp", 3)),
        (("fsdp:tensor=3", 3), ("fsdp:tensor=2", 4)),
        (("tensor", 2), ("fsdp:tensor=2", 4)),
        (("fsdp", 2), ("ddp", 3)),
        (("hsdp:shard=2", 4), ("fsdp", 1)),
        (("fsdp:tensor=2", 4), ("ddp", 2)),
        (("fsdp", 3), ("fsdp:tensor=2", 2)),
    ],
)
def test_checkpoints_cross_over(
    first: tuple[str, int], second: tuple[str, int], train: Train
) -> None:
    common: dict[str, Any] = {"checkpoint_every": 7, **FP64}
    wanted = train(DEEP, "ema=0.9", strategy="single", steps=12, **common)
    (strategy, ranks) = first
    half = train(DEEP, "ema=0.9", strategy=strategy, ranks=ranks, steps=7, **common)
    (strategy, ranks) = second
    resumed = {"steps": 12, "resume": str(half.run_dir), **common}
    found = train(DEEP, "ema=0.9", strategy=strategy, ranks=ranks, **resumed)
    for name in ("weights", "average"):
        ours, theirs = (load_file(run.run_dir / f"{name}.safetensors") for run in (found, wanted))
        assert difference(ours, theirs) < 1e-10, name


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_job_goes_on(train: Train) -> None:
    wanted = train(DEEP, strategy="single", steps=12, **FP64)
    kill = {"checkpoint_every": 4, "max_restarts": 1, "inject": "kill@rank=1,step=9"}
    found = train(DEEP, strategy="fsdp", ranks=2, steps=12, **FP64, **kill)
    assert found.summary["restarts"] == 1
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) < 1e-10


@pytest.mark.slow(most=2)
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp:shard=2", "fsdp:tensor=2"])
def test_check_calls_it_equal(strategy: str, check: Check) -> None:
    verdict = check(DEEP, strategy=strategy, ranks=2, steps=2)
    assert verdict.equal, str(verdict)


@pytest.mark.slow
def test_activations_that_are_exchanged_are_on_the_card(train: Train) -> None:
    """Blocks of columns and a row by heads, a tied table that is asked for whole, a penalty."""
    program = "tensor_tasks:Letters"
    wanted = train(program, strategy="single", steps=8, **FP64)
    found = train(program, strategy="fsdp:tensor=2", ranks=4, steps=8, **FP64)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) < 1e-10
    sent = found.summary["sent_bytes"]["gradients"] / found.summary["steps"]
    assert found.summary["card_bytes_per_step"] == pytest.approx(sent, abs=1)


@pytest.mark.slow
def test_replicas_of_a_part_are_compared(train: Train) -> None:
    with pytest.raises(AllranksError, match="ranks that must hold the same weights do not"):
        train(
            DEEP,
            strategy="hsdp:shard=2",
            ranks=4,
            steps=6,
            verify_every=1,
            inject="corrupt@rank=2,step=3",
        )


@pytest.mark.slow
def test_ranks_that_call_blocks_in_other_orders_are_told(train: Train) -> None:
    """Blocks of one shape: their weights would be mixed, and no collective would notice."""
    with pytest.raises(AllranksError, match="in different orders"):
        train(DEEP, "draws=true", strategy="fsdp", ranks=2, steps=8)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_call_fewer_blocks_are_told_which(ranks: int, train: Train) -> None:
    """After some seconds, not after `--hang-timeout`: a gathering meets that of another block."""
    told = r"some of them less often: rank 0 gathers 'blocks\.\d', .*rank 1 gathers 'blocks\.\d'"
    with pytest.raises(AllranksError, match=told):
        train(DEEP, "skips=true", strategy="fsdp", ranks=ranks, steps=8)


@pytest.mark.slow
@pytest.mark.parametrize("units", ["found", "none"])
@pytest.mark.parametrize("hides", ["plain", "slots"])
def test_blocks_may_return_objects_with_tensors_in_them(
    hides: str, units: str, train: Train
) -> None:
    settings = f"hides={hides}", f"units={units}"
    wanted = train(DEEP, *settings, strategy="single", steps=6, **FP64)
    found = train(DEEP, *settings, strategy="fsdp", ranks=2, steps=6, **FP64)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) < 1e-10


@pytest.mark.slow
def test_as_one_unit_they_may(train: Train) -> None:
    wanted = train(DEEP, "draws=true", strategy="ddp", ranks=2, steps=8, **FP64)
    found = train(DEEP, "draws=true", "units=none", strategy="fsdp", ranks=2, steps=8, **FP64)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) < 1e-10


def test_a_process_that_cut_tensors_before_forgets_their_mesh(
    on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    on_ranks(2, "fsdp_tasks:cuts_twice", str(tmp_path / "meet"))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 3), ("fsdp:tensor=2", 4)])
def test_each_rank_holds_its_part_and_no_more(
    strategy: str, ranks: int, on_ranks: Callable[..., Any]
) -> None:
    on_ranks(ranks, "fsdp_tasks:holds_its_part", strategy)


@pytest.mark.slow
def test_an_optimizer_that_looks_at_whole_tensors_is_refused_over_two_axes(train: Train) -> None:
    with pytest.raises(RequestError, match="the update of some rows is another one"):
        train(DEEP, "optimizer_name=lamb", strategy="fsdp:tensor=2", ranks=2, steps=2)


def test_groups_that_do_not_divide_the_ranks_are_refused(train: Train) -> None:
    with pytest.raises(RequestError, match="2 does not divide 3") as refused:
        train(DEEP, strategy="hsdp:shard=2", ranks=3)
    assert refused.value.do == "shard=3"
    with pytest.raises(RequestError, match="2 does not divide 3") as refused:
        train(DEEP, strategy="fsdp:tensor=2", ranks=3)
    assert refused.value.do == "--ranks 4, or leave tensor out"


def test_equal_bits_over_a_tensor_axis_are_refused(train: Train) -> None:
    with pytest.raises(RequestError, match="sums over the features of a layer"):
        train(DEEP, strategy="fsdp:tensor=2", ranks=4, bitwise=True)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("complex", "complex weights"),
        ("scripted", "a scripted module, 'out'"),
        ("shared", r"'blocks\.0\.up\.weight' and 'blocks\.1\.down\.weight', which share memory"),
        ("hook", r"a hook on the parameter 'embedding\.weight'"),
        ("late hook", r"a hook on the parameter 'blocks\.0\.up\.weight'"),
        ("tied", "shares a weight with the rest"),
        ("stranger", "no part of the model"),
        ("list", "which is never called"),
        ("backward", "a backward pass in forward or loss"),
        ("closed", "a _Closed from 'blocks.0', in which no tensor"),
    ],
)
def test_what_cannot_be_cut_is_refused(what: str, found: str, train: Train) -> None:
    with pytest.raises(RequestError, match=found):
        train("fsdp_tasks:Refused", f"what={what}", strategy="fsdp", ranks=2, steps=2)


USED = r"'blocks\.0\.a\.weight' is used outside of the forward of its block 'blocks\.0'"
WRITTEN = r"forward or loss writes the weight 'teacher\.weight'"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("ensemble", USED),
        ("lerp", WRITTEN),
        ("late data", WRITTEN),
        ("unfreezes", "other parameters than the strategy has laid out"),
        ("reads a block", USED),
        ("sums up blocks", USED),
        ("hypernetwork", r"another tensor in the place of the weight 'blocks\.0\.a\.weight'"),
        ("kept from before", r"was the weight 'blocks\.0\.a\.bias' before it was cut"),
        ("late lerp", WRITTEN),
        ("late other data", WRITTEN),
        ("late assignment", WRITTEN),
        ("numpy", WRITTEN),
        ("in evaluation", WRITTEN),
        ("late unfreezing", "other parameters than the strategy has laid out"),
        ("inputs", r"'last\.weight' is used outside of the forward of the model"),
        ("loss of a block", USED),
        ("loss of a block over the batch", USED),
        ("loss over the batch", r"uses the parameter 'last\.weight' itself"),
        ("metrics of a block", USED),
    ],
)
def test_a_weight_that_is_no_whole_one_is_neither_read_nor_written(
    what: str, found: str, train: Train
) -> None:
    with pytest.raises(AllranksError, match=found):
        train("fsdp_tasks:Looks", f"what={what}", strategy="fsdp", ranks=2, steps=6)


@pytest.mark.slow(most=4)
@pytest.mark.parametrize("strategy", ["fsdp:tensor=2", "hsdp:shard=2", "fsdp:offload=cpu"])
@pytest.mark.parametrize(
    ("what", "found"), [("reads a block", USED), ("late lerp", WRITTEN), ("late data", WRITTEN)]
)
def test_so_it_is_on_other_axes(what: str, found: str, strategy: str, train: Train) -> None:
    """The layers that a tensor axis cuts say it in words of their own."""
    by_cut_layer = "whose unit of fsdp has let go of its weights|found: it is written there"
    with pytest.raises(AllranksError, match=f"{found}|{by_cut_layer}"):
        train("fsdp_tasks:Looks", f"what={what}", strategy=strategy, ranks=4, steps=6)


@pytest.mark.slow(most=4)
@pytest.mark.parametrize(
    ("what", "strategy"),
    [
        ("loss", "fsdp"),
        ("loss", "fsdp:tensor=2"),
        ("metrics", "fsdp"),
        ("metrics", "fsdp:tensor=2"),
        ("sizes", "fsdp"),
        ("sizes", "fsdp:tensor=2"),
        ("reads data", "fsdp"),
        ("another layer's weights", "fsdp"),
        ("moves its teacher", "fsdp"),
        ("moves its teacher", "fsdp:tensor=2"),
    ],
)
def test_what_user_code_may_do_with_weights(what: str, strategy: str, train: Train) -> None:
    common: dict[str, Any] = {"steps": 6, "eval_every": "3", **FP64}
    wanted = train("fsdp_tasks:Looks", f"what={what}", strategy="single", **common)
    found = train("fsdp_tasks:Looks", f"what={what}", strategy=strategy, ranks=2, **common)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) < 1e-10
    assert found.summary["eval"] == pytest.approx(wanted.summary["eval"], rel=1e-10)


@pytest.mark.slow
def test_as_one_unit_an_ensemble_trains(train: Train) -> None:
    settings = "what=ensemble", "units=none"
    wanted = train("fsdp_tasks:Looks", *settings, strategy="single", steps=6, **FP64)
    found = train("fsdp_tasks:Looks", *settings, strategy="fsdp", ranks=2, steps=6, **FP64)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) < 1e-10


@pytest.mark.slow(but=1, most=4)
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp:shard=2", "fsdp:tensor=2"])
@pytest.mark.parametrize("start", ["transposed", "empty", "orthogonal", "a slice"])
def test_weights_of_any_layout_train_as_in_one_process(
    start: str, strategy: str, train: Train
) -> None:
    setting = f"start={start}"
    wanted = train("fsdp_tasks:Looks", setting, strategy="single", steps=6, **FP64)
    found = train("fsdp_tasks:Looks", setting, strategy=strategy, ranks=4, steps=6, **FP64)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (found, wanted))
    assert difference(ours, theirs) < 1e-10


def test_bits_of_a_transposed_weight_are_not_promised(train: Train) -> None:
    with pytest.raises(RequestError, match=r"'blocks\.1\.a\.weight', which is not contiguous"):
        train("fsdp_tasks:Looks", "start=transposed", strategy="fsdp", ranks=2, bitwise=True)

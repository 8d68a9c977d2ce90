"""Tensor parallelism: equal to one process, in blocks and by heads, and refused where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from allranks.cli.display.progress import follows_ranks
from allranks.errors import ProgramError, RequestError
from allranks.torch.parallel.tensor.plan import default_plan
from allranks.torch.parallel.tensor.strategy import sum_over_copies
from conftest import Train
from tensor_tasks import OUT, Hooked, OwnForward
from test_check import Check, check
from test_every_strategy import STEPS, difference, reference_for, references

__all__ = ["check", "references"]


class Twice:
    """Two copies of a model with the same gradients, and what they send."""

    def __init__(self) -> None:
        self.size, self.sent = 2, list[int]()

    def all_reduce(self, tensor: Tensor) -> Twice:
        self.sent.append(tensor.nbytes)
        tensor.mul_(2)
        return self

    def wait(self) -> None:
        """It is done at once."""


def test_copies_sum_their_gradients_in_few_messages() -> None:
    """One for each type of all layers; gradients stay in their own memory."""
    layers = [nn.Linear(12, 12) for _ in range(75)]
    parameters = [p for layer in layers for p in layer.parameters()]
    phases = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
    table, unused = nn.Embedding(7, 3, sparse=True), nn.Parameter(torch.ones(4, 1))
    phases.grad = torch.randn_like(phases).conj()
    table(torch.tensor([1, 1, 5])).sum().backward()
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape[::-1]).t()  # not contiguous
    precise = nn.Parameter(torch.ones(5, dtype=torch.float64))
    precise.grad = torch.full((5,), 3.0, dtype=torch.float64)
    everything = [*parameters, phases, table.weight, unused, precise]
    wanted = [
        2 * (torch.zeros_like(p) if p.grad is None else p.grad.to_dense()) for p in everything
    ]
    before = [p.grad.data_ptr() for p in parameters if p.grad is not None]
    copies: Any = Twice()
    sum_over_copies(everything, copies)
    assert len(copies.sent) == 2 and sum(copies.sent) == sum(p.nbytes for p in everything)
    for parameter, total in zip(everything, wanted, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, total)
    assert [p.grad.data_ptr() for p in parameters if p.grad is not None] == before


TASKS = ["Stack", "Planned", "Gated", "Letters", "Encoder", "Heads"]
NO_BLOCKS = ["ByIndex", "OwnForward", "Hooked", "OneDropout", "Marked"]


@pytest.mark.slow(most=4)
@pytest.mark.thinned(1, ("task", TASKS), ("ranks", [2, 3, 4]))
def test_equal_to_one_process(
    task: str, ranks: int, train: Train, references: dict[str, Any]
) -> None:
    wanted, weights = reference_for(task, train, references, "tensor_tasks")
    result = train(
        f"tensor_tasks:{task}", strategy="tensor", ranks=ranks, precision="fp64", steps=STEPS
    )
    found = result.summary
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-10)
    assert found["eval"] == pytest.approx(wanted["eval"], rel=1e-10)
    sent = found["sent_bytes"]["gradients"] / found["steps"]
    assert found["card_bytes_per_step"] == pytest.approx(sent, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("task", NO_BLOCKS)
def test_what_is_between_gets_what_it_needs(
    task: str, train: Train, references: dict[str, Any]
) -> None:
    """Layers that look like a block, and are none, or not always; weights that are marked."""
    _, weights = reference_for(task, train, references, "tensor_tasks")
    result = train(
        f"tensor_tasks:{task}", strategy="tensor", ranks=2, precision="fp64", steps=STEPS
    )
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10


CUT_EVERYWHERE = [
    ("tensor", 2),
    ("tensor", 3),
    ("tensor:exact=yes", 2),
    ("fsdp:tensor=2", 4),
    ("mesh:data=2,tensor=2", 4),
    ("tensor:data=2", 4),
]


@pytest.mark.slow(most=3)
@pytest.mark.thinned(
    1, ("strategy,ranks", CUT_EVERYWHERE), ("task", ["Looks", "Derives", "Padded"])
)
def test_user_code_meets_whole_weights_whichever_way_it_takes(
    task: str, strategy: str, ranks: int, train: Train, references: dict[str, Any]
) -> None:
    """In forward, loss and metrics, in training and evaluation, differentiated twice."""
    if strategy.startswith("fsdp") and task == "Looks":
        task = "LooksInForward"
    wanted, weights = reference_for(task, train, references, "tensor_tasks")
    result = train(
        f"tensor_tasks:{task}", strategy=strategy, ranks=ranks, precision="fp64", steps=STEPS
    )
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert result.summary["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-10)
    assert result.summary["eval"] == pytest.approx(wanted["eval"], rel=1e-10)


@pytest.mark.slow
def test_loss_of_an_evaluation_is_refused_weights_that_fsdp_has_let_go_of(train: Train) -> None:
    with pytest.raises(RequestError, match="whose unit of fsdp has let go of its weights"):
        train("tensor_tasks:Looks", strategy="fsdp:tensor=2", ranks=4, precision="fp64", steps=1)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("data", "a cut weight in forward or loss"),
        ("in place", "it is written there, by"),
        ("another", "it takes its part of a whole weight"),
        ("zero_grad", "its .grad is read there"),
    ],
)
def test_forward_may_not_write_a_cut_weight(how: str, message: str, train: Train) -> None:
    with pytest.raises(RequestError, match=message):
        train("tensor_tasks:WritesAWeight", f"how={how}", strategy="tensor", ranks=2, steps=1)


def test_a_block_is_a_plain_chain_that_nobody_looks_into() -> None:
    def blocks(model: nn.Module) -> set[str | None]:
        return {cut.block for cut in default_plan(model, 2).cuts.values()} - {None}

    def stack() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    assert blocks(stack()) == {"0"}
    assert blocks(OwnForward().model()) == blocks(Hooked().model()) - {"6"} == set()
    again = stack()
    assert blocks(nn.Sequential(*again, nn.Softmax(-1), *again)) == set()
    norm, first, relu, last = nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)
    assert blocks(nn.Sequential(norm, first, relu, norm, last)) == set()
    assert blocks(nn.TransformerEncoderLayer(8, 2, 16)) == {"self_attn", "linear1"}
    assert blocks(nn.TransformerEncoderLayer(8, 1, 16)) == {"linear1"}
    assert blocks(nn.TransformerEncoderLayer(8, 2, 16, activation=nn.Softmax(-1))) == {"self_attn"}
    assert blocks(nn.MultiheadAttention(8, 2, add_bias_kv=True)) == set()


def test_small_layers_by_themselves_are_whole_where_they_save_little() -> None:
    """A head of 40 weights beside 2048 in a block: 2 ranks hold 1/2 of them, and 1/20 is 52."""

    def cut(ranks: int, *after: nn.Module) -> set[str]:
        block = nn.Linear(4, 256, bias=False), nn.ReLU(), nn.Linear(256, 4, bias=False)
        return set(default_plan(nn.Sequential(*block, nn.Softmax(-1), *after), ranks).cuts)

    head = nn.Linear(4, 10, bias=False)
    assert cut(2, head) == {"0", "2"}
    assert cut(4, head) == {"0", "2", "4"}  # of less that a rank holds it is more
    assert cut(2, head, nn.Softmax(-1), nn.Linear(10, 3)) == {"0", "2", "4"}  # the smallest alone
    tied = nn.Linear(4, 10, bias=False)
    tied.weight = head.weight
    assert cut(2, head, nn.Unflatten(-1, (10, 1)), nn.Flatten(), tied) == {"0", "2"}
    many = nn.Sequential(*(layer for _ in range(50) for layer in (nn.Linear(4, 4), nn.Softmax(-1))))
    assert len(default_plan(many, 2).cuts) == 49
    alone = nn.Sequential(nn.Conv1d(64, 64, 3), nn.Flatten(), nn.Linear(64, 2))
    assert set(default_plan(alone, 2).cuts) == {"2"}  # else there would be nothing


def test_a_weight_stays_whole_where_it_is_tied_to_a_layer_that_does() -> None:
    """As in the head of BERT: the bias belongs to the layer above, the weight to the embedding."""

    class Head(nn.Module):
        def __init__(self, tokens: nn.Embedding) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 40)
            self.linear.weight, self.bias = tokens.weight, self.linear.bias

    tokens = nn.Embedding(40, 8)
    model = nn.ModuleDict({"tokens": tokens, "head": Head(tokens), "other": nn.Linear(64, 64)})
    assert set(default_plan(model, 2).cuts) == {"other"}


@pytest.mark.slow
def test_micro_batches_that_cut_a_shard_draw_what_one_process_draws(
    train: Train, references: dict[str, Any]
) -> None:
    _, weights = reference_for("Letters", train, references, "tensor_tasks")
    result = train(
        "tensor_tasks:Letters",
        strategy="tensor:data=2",
        ranks=4,
        precision="fp64",
        steps=STEPS,
        micro_batch=2,
        activation_checkpointing=True,
    )
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    sent = result.summary["sent_bytes"]["gradients"] / STEPS
    assert result.summary["card_bytes_per_step"] == pytest.approx(sent, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tied"), [(2, True), (3, False)])
def test_logits_that_stay_cut_give_the_loss_of_whole_ones(
    ranks: int, tied: bool, train: Train
) -> None:
    """11 classes; torch's own loss in one process, and fewer bytes than if they were gathered."""
    program, common = "tensor_tasks:CutLogits", {"precision": "fp64", "steps": STEPS}
    settings = (f"tied={tied}",)
    gathers = train(program, *settings, "gathers=True", strategy="single", **common)
    cut = train(program, *settings, strategy="tensor", ranks=ranks, **common)
    ours, theirs = (load_file(run.run_dir / "weights.safetensors") for run in (cut, gathers))
    assert difference(ours, theirs) < 1e-10
    assert cut.summary["eval"] == pytest.approx(gathers.summary["eval"], rel=1e-10)
    sent = cut.summary["sent_bytes"]["gradients"]
    assert cut.summary["card_bytes_per_step"] == pytest.approx(sent / STEPS, abs=1)
    whole = train(program, *settings, "gathers=True", strategy="tensor", ranks=ranks, **common)
    tokens = STEPS * 24 * 7
    saved = whole.summary["sent_bytes"]["gradients"] - sent
    assert saved > 0.5 * tokens * 8 * (11 - 3 * 2) * (ranks - 1) / ranks


def test_a_target_that_is_no_class_is_told(train: Train) -> None:
    with pytest.raises(ProgramError, match="out of bounds"):
        train("tensor_tasks:CutLogits", "beyond=11", strategy="tensor", ranks=2, steps=1)


def test_a_block_sends_its_output_and_the_gradient_of_its_input(train: Train) -> None:
    """By hand: a batch of 24 samples on 2 ranks, one all-reduce each way for a block."""
    result = train("tensor_tasks:Stack", strategy="tensor", ranks=2, precision="fp64", steps=4)
    outputs = 24 * (OUT + OUT) * 8
    inputs = 24 * OUT * 8  # of the second block: the data needs no gradient
    tally = (1 + 8 + 9 + 1) * 8  # loss, counts, a flag for each of nine parameters, the norm
    assert result.summary["sent_bytes"]["gradients"] == 4 * (outputs + inputs + tally)


@pytest.mark.slow(most=1)
@pytest.mark.parametrize("task", ["Heads", "Letters", "Planned"])
def test_checkpoints_cross_over(task: str, train: Train, references: dict[str, Any]) -> None:
    """ddp on 2 ranks, tensor on 2, tensor on 4 in two copies, one process: 10 steps of one."""
    _, weights = reference_for(task, train, references, "tensor_tasks")
    common: dict[str, Any] = {"precision": "fp64", "checkpoint_every": 5}
    resume: dict[str, Any] = {}
    for strategy, ranks, steps in (
        ("ddp", 2, 3),
        ("tensor", 2, 5),
        ("tensor:data=2", 4, 8),
        ("single", 1, STEPS),
    ):
        result = train(
            f"tensor_tasks:{task}", strategy=strategy, ranks=ranks, steps=steps, **common, **resume
        )
        resume = {"resume": str(result.run_dir)}
    assert result.summary["resumed_from_step"] == 8
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10


@pytest.mark.slow
def test_a_checkpoint_keeps_the_bits_of_weights_and_optimizer(train: Train) -> None:
    """What one process saved is what comes out again of two that hold parts, without a step."""
    program, common = "tensor_tasks:Letters", {"precision": "fp64", "checkpoint_every": 3}
    one = train(program, strategy="single", steps=3, **common)
    digest = one.summary["weights_sha256"]
    assert digest
    two = train(program, strategy="tensor", ranks=2, steps=3, resume=str(one.run_dir), **common)
    assert two.summary["weights_sha256"] == digest
    both = [
        train(program, strategy="single", ranks=1, steps=4, resume=str(run.run_dir), **common)
        for run in (one, two)
    ]
    assert both[0].summary["weights_sha256"] == both[1].summary["weights_sha256"]


@pytest.mark.slow
def test_heads_that_are_cut_twice_cross_over(train: Train) -> None:
    """Query, key and value of one weight lie in runs on a rank, and are saved as one process has
    them, with their moments: no strategy that takes the state up changes the step after it."""
    program, common = "tensor_tasks:Heads", {"precision": "fp64", "checkpoint_every": 2}
    run = first = train(program, strategy="single", steps=2, **common)
    for strategy, ranks in (("tensor", 4), ("fsdp:tensor=2", 4), ("mesh(tensor=2)", 2)):
        resume = str(run.run_dir)
        run = train(program, strategy=strategy, ranks=ranks, steps=2, resume=resume, **common)
        assert run.summary["weights_sha256"] == first.summary["weights_sha256"]
    both = [
        train(program, strategy="single", ranks=1, steps=3, resume=str(one.run_dir), **common)
        for one in (first, run)
    ]
    assert both[0].summary["weights_sha256"] == both[1].summary["weights_sha256"]


@pytest.mark.slow
def test_a_block_that_draws_by_function_is_told(train: Train, references: dict[str, Any]) -> None:
    """What is drawn for whole activations is that of one process; parts have no such numbers."""
    _, weights = reference_for("ByFunction", train, references, "tensor_tasks")
    common: dict[str, Any] = {"strategy": "tensor", "ranks": 2, "precision": "fp64"}
    whole = train("tensor_tasks:ByFunction", steps=STEPS, **common)
    assert difference(load_file(whole.run_dir / "weights.safetensors"), weights) < 1e-10
    inside = train("tensor_tasks:ByFunction", "inside=True", steps=2, **common)
    told = [str(follows_ranks(run.summary)) for run in (whole, inside)]
    assert ["forward draws from torch's own generator" in text for text in told] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "tensor:data=2"])
def test_check_calls_it_equal(strategy: str, check: Check) -> None:
    ranks = 4 if "data" in strategy else 2
    verdict = check("tensor_tasks:Letters", strategy=strategy, ranks=ranks, steps=2)
    assert verdict.equal, str(verdict)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("task", "ranks", "message"),
    [
        ("Refused:no such module", 2, "no module has such a name"),
        ("Refused:no such way", 2, "a way is one of column, row, vocabulary"),
        ("Refused:another layer", 2, "norm: column, which is a LayerNorm"),
        ("Refused:heads torn", 2, "are cut into the same parts"),
        ("Refused:too few heads", 4, "all the same number of heads"),
        ("Refused:nothing", 2, "compute the same as all others"),
        ("WholeTensors", 2, "updates every parameter by itself"),
        ("HookedWeight", 2, "a hook on the parameter '0.weight'"),
        ("TiedApart", 2, "embedding and out, which share a weight"),
    ],
)
def test_what_cannot_be_is_refused(task: str, ranks: int, message: str, train: Train) -> None:
    name, _, fault = task.partition(":")
    settings = (f"fault={fault}",) if fault else ()
    with pytest.raises(RequestError, match=message):
        train(f"tensor_tasks:{name}", *settings, strategy="tensor", ranks=ranks, steps=1)


def test_ranks_that_make_no_copies_are_refused(train: Train) -> None:
    with pytest.raises(RequestError, match="3 ranks for 2 copies of the model"):
        train("tensor_tasks:Stack", strategy="tensor:data=2", ranks=3, steps=1)
    with pytest.raises(RequestError, match="3 ranks in 1 copy of the model"):
        train("tensor_tasks:Stack", strategy="tensor:exact=yes", ranks=3, steps=1)


@pytest.mark.slow(most=1)
@pytest.mark.cases(
    ("task", "settings"),
    [
        ("Letters", ("heads=12",)),
        ("Heads", ("heads=8",)),
        ("CutLogits", ("vocabulary=16", "tied=True")),
    ],
    exhaustive=[
        ("Letters", ("heads=8",)),
        ("Stack", ()),
        ("CutLogits", ("vocabulary=16", "tied=False")),
    ],
)
def test_exact_sums_give_the_same_bits_on_any_ranks(
    task: str, settings: tuple[str, ...], train: Train
) -> None:
    """In float32, in blocks, by heads, layer by layer, with the loss of a head that is cut; over
    the last batch of an epoch too."""
    digests = set()
    for ranks in (1, 2, 4, 8):
        result = train(
            f"tensor_tasks:{task}",
            *settings,
            strategy="tensor:exact=yes",
            ranks=ranks,
            steps=6,
            threads=1,
        )
        digests.add(result.summary["weights_sha256"])
        sent = result.summary["sent_bytes"]["gradients"] / 6
        assert result.summary["card_bytes_per_step"] == pytest.approx(sent, abs=1)
    assert len(digests) == 1

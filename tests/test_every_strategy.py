"""The contract: every strategy keeps the guarantee on its card, with every kind of task.

In float64, 10 optimizer steps (two epochs), both runs free, on 1, 2, 3, 4 and 8 ranks: weights and
buffers within 1e-10 (norm-relative) of `single`; the same losses, the same evaluation; the bytes
that the card promises, counted at the process group; a state that can be taken up again. Adding a
strategy is a line in `SETTINGS`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import contract_tasks
from allranks.errors import RequestError
from allranks.strategies.card import Exact
from allranks.strategies.cards import CARDS
from allranks.strategies.choice import parse_choice
from allranks.strategies.mesh import CONTEXT, PIPELINE, TENSOR
from allranks.strategies.resolve import card_for, has_mesh, strategy_spec
from allranks.strategies.shards import even_sizes, owned_shards
from allranks.training.order import Order
from conftest import Train

LATE = ["ddp:late=1,bucket_mb=0.0005", "ddp:late=1,reduce=tree"]
COMPRESSED = [
    "ddp:reduce=top-k(k=3,chunk=16),bucket_mb=0.0005",
    "ddp:reduce=two-bit(threshold=0.01)",
    "ddp:reduce=power-sgd(rank=2,min_rate=0),bucket_mb=0.0005",
    *("ddp:reduce=one-bit,bucket_mb=0.0005", "ddp:reduce=n-bit(bits=4)"),
]
PARTS = {
    "fsdp": ["fsdp:reduce=top-k(k=3,chunk=16)", "fsdp:reduce=two-bit(threshold=0.01)"],
    "hsdp": ["hsdp:shard=2,reduce=top-k(k=3,chunk=16)"],
}
SETTINGS = {
    "single": ["single"],
    "dp": ["dp:replicas=3"],
    "model-parallel": ["model-parallel", "model-parallel:parts=3,by=size,split=4"],
    "ddp-plain": ["ddp-plain"],
    "ddp": [
        *("ddp", "ddp:bucket_mb=0.0005", "ddp:reduce=tree", "ddp:reduce=tree,bucket_mb=0.0005"),
        *("ddp:reduce=fp16,bucket_mb=0.0005", "ddp:reduce=bf16"),
        *("ddp:reduce=ring(pieces=2),bucket_mb=0.0005", "ddp:reduce=halving-doubling"),
        *("ddp:reduce=binary-tree", "ddp:reduce=star", "ddp:reduce=hierarchical(group=2)"),
        *LATE,
        *COMPRESSED,
    ],
    "zero1": ["zero1", "zero1:reduce=tree,bucket_mb=0.0005"],
    "zero2": ["zero2:bucket_mb=0.0005", "zero2:reduce=tree"],
    "fsdp": [
        *("fsdp", "fsdp:reshard=false", "fsdp:reduce=tree", "fsdp:tensor=2"),
        "fsdp:tensor=2,sequence=yes",
        *PARTS["fsdp"],
    ],
    "hsdp": ["hsdp:shard=2", "hsdp:shard=2,reduce=tree", *PARTS["hsdp"]],
    "gpipe": ["gpipe"],
    "1f1b": ["1f1b", "1f1b:by=cost"],
    "interleaved": ["interleaved:chunks=2"],
    "zero-bubble": ["zero-bubble"],
    "independent": ["independent"],
    "branches": ["branches"],
    "decoupled": ["decoupled:every=1,lr=1,momentum=0"],
    "ps": [
        *("ps", "ps:servers=2,bound=10,transport=sockets", "ps:backup=1"),
        "ps:servers=2,bound=10,update=worker",
    ],
    "tensor": [
        *("tensor", "tensor:data=2", "tensor:exact=yes"),
        *("tensor:sequence=yes", "tensor:data=2,sequence=yes"),
    ],
    "context": ["context", "context:attention=ring", "context:data=2,bucket_mb=0.0005"],
    "mesh": [
        *("mesh:data=2,tensor=2,pipeline=2", "mesh:data=2,tensor=2", "mesh:data=3"),
        *("mesh:data=2,pipeline=2,schedule=gpipe", "mesh:tensor=2,pipeline=2"),
        *("mesh:pipeline=2,schedule=interleaved(chunks=2)", "mesh:data=2,pipeline=2,reduce=tree"),
        "mesh:data=2,tensor=2,sequence=yes",
    ],
    "expert": ["expert", "expert:replicas=2,bucket_mb=0.0005"],
    "local-sgd": ["local-sgd:every=2"],
    "slowmo": ["slowmo:every=2"],
    "block-momentum": ["block-momentum:every=2"],
    "diloco": ["diloco:every=2,fragments=2,overlap=1", "diloco:every=2,fragments=2,bits=4"],
    "sparse-loco": ["sparse-loco:every=2,chunk=64,keep=8"],
}
LEARNERS = ("local-sgd", "slowmo", "block-momentum", "diloco", "sparse-loco")
OUTER = [strategy for name in LEARNERS for strategy in SETTINGS[name]]
STAGES = {
    "Images": 5,
    "Words": 4,
    "Pairs": 0,
    "Uneven": 3,
    "Experts": 4,
    "Pictures": 2,
    "Sentences": 0,
}
"""Into how many stages each task can be cut; others into none."""
BRANCHES = {"Images": 5, "Words": 3, "Pairs": 2, "Uneven": 3, "Experts": 3, "Pictures": 2}
"""How many branches each task names; others none."""
TASKS = ["Images", "Words", "Pairs", "Uneven", "Experts", "Pictures", "Sentences", "Mixture"]
RANKS = [1, 2, 3, 4, 8]
STEPS = 10


def is_exact(strategy: str) -> bool:
    choice = parse_choice(strategy)
    card = card_for(choice)
    return isinstance(card.guarantee_of(card.read_options(choice.options)), Exact)


EXACT = [s for settings in SETTINGS.values() for s in settings if is_exact(s)]

Weights = dict[str, np.ndarray[Any, Any]]


def is_taken_up(name: str, strategy: str) -> bool:
    return name not in ("decoupled", "ps") and "by=cost" not in strategy


def difference(ours: Weights, theirs: Weights) -> float:
    """The largest norm-relative difference over all tensors."""
    assert ours.keys() == theirs.keys()
    pairs = [(ours[n].astype(np.float64), theirs[n].astype(np.float64)) for n in theirs]
    return max(
        float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12)) for a, b in pairs
    )


@pytest.fixture(scope="session")
def references() -> dict[str, Any]:
    """What `single` made of each task, once for all tests."""
    return {}


def reference_for(
    task: str, train: Train, references: dict[str, Any], module: str = "contract_tasks"
) -> tuple[Any, Weights]:
    program = f"{module}:{task}"
    if program not in references:
        result = train(program, strategy="single", precision="fp64", steps=STEPS)
        references[program] = (result.summary, load_file(result.run_dir / "weights.safetensors"))
    found: tuple[Any, Weights] = references[program]
    return found


def check_that_it_goes_on_after_a_kill(
    train: Train, program: str, strategy: str, weights: Weights
) -> None:
    """Rank 1 of 2 is killed in step 9: the job goes on from its checkpoint, to the same end."""
    result = train(
        program,
        strategy=strategy,
        ranks=2,
        precision="fp64",
        steps=STEPS,
        checkpoint_every=4,
        max_restarts=1,
        inject="kill@rank=1,step=9",
    )
    assert result.summary["restarts"] == 1
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10


def test_every_card_has_a_setting() -> None:
    assert SETTINGS.keys() == {name for name, card in CARDS.items() if "torch" in card.engines}
    rest = {s for settings in SETTINGS.values() for s in settings} - set(EXACT)
    # Equal to a simulation: `independent` and late ones below, the others in
    # tests/on_torch/test_half_reducers.py, test_compressed_reducers.py,
    # test_compressed_parts.py, test_column_reducers.py, test_decoupled.py and tests/test_outer.py.
    half = {"ddp:reduce=fp16,bucket_mb=0.0005", "ddp:reduce=bf16"}
    apart = {"independent", *SETTINGS["decoupled"], *OUTER}
    assert rest == {*apart, *half, *LATE, *COMPRESSED, *PARTS["fsdp"], *PARTS["hsdp"]}


NOTHING_TO_CUT = {  # of 4 features
    *(("tensor", ranks, "Experts") for ranks in (3, 8)),
    *(("tensor:exact=yes", ranks, "Experts") for ranks in RANKS),
}


NOT_SERVED = ("Pairs", "Uneven")
"""Tasks whose loss needs a whole batch, or whose data are a stream: refused by `ps`."""

SEQUENCES = {"ulysses": (2, 4), "ring": (2, 3, 4), "sequence": (2, 4)}
"""Over how many ranks the 12 positions of 4 heads of `Sentences` can be cut."""


def takes(strategy: str, ranks: int, task: str) -> bool:
    """Whether a strategy trains such a task on so many ranks."""
    if strategy == "branches":
        return ranks <= BRANCHES.get(task, 0)
    if is_staged(strategy):
        if not has_mesh(strategy, ranks):
            return False
        stages = strategy_spec(strategy, ranks).mesh.size(PIPELINE)
        if task == "Words" and stages > 1 and "tree" in strategy:
            return False  # its tied weight is in two stages
        chunks = 2 if stages > 1 and "chunks=2" in strategy else 1
        if "sequence=yes" in strategy:
            return task == "Sentences"
        return stages * chunks <= STAGES.get(task, 0)
    if strategy.startswith("expert") and ranks > 1 and task != "Mixture":
        return False
    if (strategy, ranks, task) in NOTHING_TO_CUT:
        return False
    if strategy.startswith("ps") and (task in NOT_SERVED or (ranks == 1 and "backup" in strategy)):
        return False
    with suppress(RequestError):
        spec = strategy_spec(strategy, ranks)
        if (parts := spec.mesh.size(CONTEXT)) > 1:
            return task == "Sentences" and parts in SEQUENCES[spec.options["attention"]]
        if "sequence=yes" in strategy and (parts := spec.mesh.size(TENSOR)) > 1:
            return task == "Sentences" and parts in SEQUENCES["sequence"]
        return ranks == 1 or CARDS[strategy.partition(":")[0]].many_ranks
    return False


BETWEEN_TWO = ("ring", "halving-doubling", "binary-tree", "star", "hierarchical")


def matters(strategy: str, ranks: int, task: str) -> bool:
    """Of what a strategy takes what can go wrong for it: on one rank those for many are another
    one, whatever their options, and an all-reduce by sends does not see what is in its buckets.
    """
    if not takes(strategy, ranks, task):
        return False
    name = strategy.partition(":")[0]
    if ranks == 1 and CARDS[name].many_ranks:
        return task == "Images" and strategy == SETTINGS[name][0]
    if strategy == "single":
        return task == "Images"
    sends = any(f"reduce={way}" in strategy for way in BETWEEN_TWO)
    return not sends or task in ("Images", "Words", "Uneven")


def is_staged(strategy: str) -> bool:
    weights = CARDS[strategy.partition(":")[0]].agreement.weights
    return weights == "staged" and strategy != "branches"


@pytest.mark.slow(but=14)
@pytest.mark.thinned(
    2,
    ("strategy", EXACT),
    ("ranks", RANKS),
    ("task", TASKS),
    where=matters,
    cost=lambda _, ranks, __: ranks,
    of=lambda strategy, ranks, task: (strategy.partition(":")[0], ranks, task),
)
def test_exact(
    strategy: str, ranks: int, task: str, train: Train, references: dict[str, Any]
) -> None:
    wanted, weights = reference_for(task, train, references)
    module = "pipeline_tasks" if is_staged(strategy) else "contract_tasks"
    result = train(
        f"{module}:{task}", strategy=strategy, ranks=ranks, precision="fp64", steps=STEPS
    )
    found = result.summary
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert found["steps"] == wanted["steps"]
    assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-10)
    assert found["eval"] == pytest.approx(wanted["eval"], rel=1e-10)
    sent = found["sent_bytes"]["gradients"] / found["steps"]
    leads = not is_staged(strategy) or ranks <= 2  # else a stage in the middle sends most
    leads = leads and not ("binary-tree" in strategy and ranks > 4)  # nor does the root then
    leads = leads and "backup" not in strategy  # who takes over what, the clock says
    if task != "Uneven" and leads:  # a stream sends once more, to find that its epoch has ended
        if "update=worker" not in strategy:  # who does two parts of a step, pulls its update once
            assert found["card_bytes_per_step"] <= sent * (1 + 1e-9) + 1
        padding = ranks * 8 * 40  # a tree pads each bucket to a multiple of the ranks
        assert sent <= found["card_bytes_per_step"] + (padding if "tree" in strategy else 1)


@pytest.mark.slow(but=1)
@pytest.mark.cases("ranks", [1, 3, 8], exhaustive=[2, 4])
def test_independent_equals_separate_trainings(
    ranks: int, on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """A plain loop in this process, on the samples of each rank's shards, with plain torch."""
    job = {"strategy": "independent", "precision": "fp64", "steps": STEPS}
    argument = {"task": "Plain", "job": job, "out": str(tmp_path)}
    on_ranks(ranks, "contract_workers:train_and_save", argument)
    for rank in range(ranks):
        found = load_file(tmp_path / f"rank-{rank}.safetensors")
        assert difference(found, plain_training(ranks, rank)) < 1e-10


@pytest.mark.slow(most=4)
@pytest.mark.thinned(1, ("strategy", LATE), ("ranks", [2, 3, 8]), ("task", TASKS))
def test_late_gradients_are_those_of_one_process(
    strategy: str, ranks: int, task: str, train: Train, references: dict[str, Any]
) -> None:
    """On any ranks what the loop over one rank gives, which is held to plain torch below."""
    flags: dict[str, Any] = {"strategy": strategy, "precision": "fp64", "steps": STEPS}
    if (strategy, task) not in references:
        alone = train(f"contract_tasks:{task}", **flags)
        references[strategy, task] = alone.summary, load_file(alone.run_dir / "weights.safetensors")
    wanted, weights = references[strategy, task]
    result = train(f"contract_tasks:{task}", ranks=ranks, **flags)
    found = result.summary
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-10)
    assert found["eval"] == pytest.approx(wanted["eval"], rel=1e-10)
    if task != "Uneven":
        sent, card = found["sent_bytes"]["gradients"] / STEPS, found["card_bytes_per_step"]
        assert (1 - 1 / STEPS) * card - 1 <= sent <= card + 1  # the last is on its way still


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("task", "ranks", "after"),
    [("Plain", 1, 0), ("Plain", 2, 0), ("Penalised", 2, 0), ("Penalised", 2, 2)],
)
def test_late_gradients_are_a_plain_loop_with_a_delay_of_one(
    task: str, ranks: int, after: int, train: Train
) -> None:
    """AdamW with decay, clipping, an uneven last batch: the first late step updates nothing."""
    late = f"ddp:late=1(after={after})" if after else "ddp:late=1"
    flags: dict[str, Any] = {"strategy": late, "precision": "fp64", "steps": STEPS}
    result = train(f"contract_tasks:{task}", "clip_norm=0.2", ranks=ranks, **flags)
    found = load_file(result.run_dir / "weights.safetensors")
    wanted = late_training(getattr(contract_tasks, task)(), after, clip_norm=0.2)
    assert difference(found, wanted) < 1e-10


def late_training(task: contract_tasks.Plain, after: int, clip_norm: float) -> Weights:
    torch.manual_seed(0)
    model = task.model().double()
    optimizer = task.optimizer(model)
    data = task.train_data()
    order = Order(len(data[0]), task.batch_size, 0, "keep")
    parameters = list(model.parameters())
    before: tuple[torch.Tensor, ...] | None = None
    for step in range(STEPS):
        chosen = order.batch(*divmod(step, order.steps_per_epoch))
        batch = [tensor[chosen] for tensor in data]
        loss, added = task.loss(model(batch[0]), batch).mean(), task.regularizer(model)
        loss = loss if added is None else loss + added
        gradients = torch.autograd.grad(loss, parameters)
        if step < after:
            before = gradients
        if before is not None:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
            optimizer.step()
        before = gradients if step >= after else None
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def plain_training(ranks: int, rank: int) -> Weights:
    task = contract_tasks.Plain()
    torch.manual_seed(0)
    model = task.model().double()
    optimizer = task.optimizer(model)
    data = task.train_data()
    order = Order(len(data[0]), task.batch_size, 0, "keep")
    for step in range(STEPS):
        chosen = order.batch(*divmod(step, order.steps_per_epoch))
        sizes = even_sizes(len(chosen), task.shards)
        owned = owned_shards(task.shards, ranks, rank)
        first = sum(sizes[: owned.start])
        own = chosen[first : first + sum(sizes[k] for k in owned)]
        if len(own):
            optimizer.zero_grad()
            batch = [tensor[own] for tensor in data]
            task.loss(model(batch[0]), batch).mean().backward()
            optimizer.step()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.slow(but=1, most=24)
@pytest.mark.thinned(
    1,
    # by=cost measures again, and may cut elsewhere: checkpoints know no cut, this state does;
    # decoupled and ps have no loop of one's own
    ("strategy", [s for n, ss in SETTINGS.items() for s in ss if is_taken_up(n, s)]),
    ("ranks", [1, 3]),
    ("task", ["Images", "Uneven", "Sentences"]),
    where=matters,
)
def test_a_state_can_be_taken_up_again(
    strategy: str, ranks: int, task: str, on_ranks: Callable[..., Any]
) -> None:
    """k + k steps equal 2k, in the middle of an epoch, for tensors and for streams."""
    argument = {"task": task, "job": {"strategy": strategy}, "steps": 3}
    on_ranks(ranks, "contract_workers:go_on_from_a_state", argument)


def test_stop_on_4_ranks_and_resume_on_3_gives_the_bits_of_1(
    on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    def run(ranks: int, until: int, load: str, save: str) -> dict[str, Any]:
        argument = {
            "task": "Images",
            "job": {"bitwise": True, "strategy": "ddp"},
            "until": until,
            "load": load and str(tmp_path / load),
            "save": str(tmp_path / save),
        }
        on_ranks(ranks, "contract_workers:stop_or_resume", argument)
        state: dict[str, Any] = torch.load(tmp_path / save, weights_only=True)
        return state

    run(4, 7, "", "half")
    resumed = run(3, 13, "half", "resumed")["strategy"]
    whole = run(1, 13, "", "whole")["strategy"]
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, resumed["model"][name]), name
    for number, moments in whole["optimizer"]["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(tensor, resumed["optimizer"]["state"][number][name]), name


@pytest.mark.slow
def test_the_first_bucket_leaves_before_backward_ends(on_ranks: Callable[..., Any]) -> None:
    argument = {"task": "Images", "job": {"strategy": "ddp:bucket_mb=0.0005"}}
    on_ranks(2, "contract_workers:first_bucket_leaves_early", argument)


@pytest.mark.slow(most=4)
@pytest.mark.parametrize("strategy", ["single", *(n for n in SETTINGS if not is_exact(n))])
def test_convergence_at_the_default_setting(strategy: str, train: Train) -> None:
    """One process learns, and so do those that are not exact, `independent` on its part."""
    epochs = 60 if strategy == "sparse-loco" else 8  # which meets every 30 steps
    ranks = 2 if CARDS[strategy].many_ranks else 1
    result = train("digits", f"epochs={epochs}", strategy=strategy, ranks=ranks)
    assert result.summary["eval"]["accuracy"] > 0.95, strategy

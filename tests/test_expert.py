"""Mixtures of experts: a plain loop says what they are, and `expert` computes that on any ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor
from torch.nn import functional as F

from allranks.errors import ProgramError, RequestError
from allranks.torch import MixtureOfExperts
from allranks.torch.parallel.expert.mixture import balance_losses, choose, route
from conftest import Train
from expert_tasks import WIDTH
from test_check import Check, check
from test_every_strategy import STEPS, difference

__all__ = ["check"]

RECOMPUTE = {"activation_checkpointing": True}


@pytest.fixture(scope="session")
def alone() -> dict[str, Any]:
    """What `single` made of each task, once for all tests."""
    return {}


def reference(
    task: str, train: Train, alone: dict[str, Any], *settings: str, **job: Any
) -> tuple[Any, Any]:
    key = " ".join((task, *settings, *map(str, job.items())))
    if key not in alone:
        program = f"expert_tasks:{task}"
        common = {"strategy": "single", "precision": "fp64", "steps": STEPS}
        result = train(program, *settings, **common, **job)
        alone[key] = result.summary, load_file(result.run_dir / "weights.safetensors")
    summary, weights = alone[key]
    return summary, weights


# --- the layer ------------------------------------------------------------------------------------


def plain(
    layer: MixtureOfExperts, tokens: Tensor, counted: list[bool], groups: list[int]
) -> tuple[Tensor, Tensor]:
    """Output and balance loss of each group, token by token, without an index that is computed."""
    outputs, balances, start = [torch.zeros_like(tokens[0]) for _ in tokens], [], 0
    for size in groups:
        own = [t for t in range(start, start + size) if counted[t]]
        start += size
        chances = {t: F.softmax(layer.router.weight @ tokens[t], 0) for t in own}
        best = {t: sorted(range(layer.experts), key=lambda e: -chances[t][e])[:2] for t in own}
        factor = layer.capacity_factor or layer.experts
        room = [max(1, math.ceil(factor * 2 * len(own) / layer.experts))] * layer.experts
        for choice in range(2):
            for t in own:
                expert = best[t][choice]
                if not room[expert]:
                    continue
                room[expert] -= 1
                hidden = F.gelu(tokens[t] @ layer.up[expert] + layer.up_bias[expert])
                found = hidden @ layer.down[expert] + layer.down_bias[expert]
                gate = chances[t][expert] / sum(chances[t][e] for e in best[t])
                outputs[t] = outputs[t] + gate * found
        share = [sum(e in best[t] for t in own) / (2 * len(own)) for e in range(layer.experts)]
        mean = sum(chances.values()) / len(own)
        balances.append(layer.experts * sum(s * m for s, m in zip(share, mean, strict=True)))
    return torch.stack(outputs), torch.stack(balances)


@pytest.mark.parametrize("factor", [None, 0.5, 1.25])
def test_the_layer_is_a_plain_loop_over_tokens(factor: float | None) -> None:
    """Output, balance, and the gradients of both; 3 samples of 4 tokens, a group for each."""
    torch.manual_seed(1)
    layer = MixtureOfExperts(5, 7, 4, capacity_factor=factor, over="sample").double()
    input = torch.randn(3, 4, 5, dtype=torch.float64)
    counted = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    found = layer(input, counted)
    output, balance = plain(layer, input.view(12, 5), counted.flatten().bool().tolist(), [4, 4, 4])
    torch.testing.assert_close(found.output, output.view(3, 4, 5))
    torch.testing.assert_close(found.balance, balance)
    parameters = list(layer.parameters())
    weigh = torch.randn(3, 4, 5, dtype=torch.float64)
    ours = (found.output * weigh).sum() + found.balance.square().sum()
    theirs = (output.view(3, 4, 5) * weigh).sum() + balance.square().sum()
    pairs = (torch.autograd.grad(total, parameters) for total in (ours, theirs))
    for mine, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, wanted)
    logits = F.linear(input, layer.router.weight)
    squares = torch.logsumexp(logits, -1).square() * counted
    torch.testing.assert_close(found.z, squares.sum(1) / counted.sum(1))
    assert (found.output[1, 2:] == 0).all()


def test_ties_go_to_the_lower_expert_and_first_choices_before_second_ones() -> None:
    chosen = choose(torch.zeros(3, 4), 2, None)
    assert chosen.experts.tolist() == [[0, 1]] * 3
    assert balance_losses(chosen, [3]).tolist() == pytest.approx([1.0])
    logits = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [2.0, 1.0, 0.0]])
    routes = route(choose(logits, 2, None), [3], 1.0)  # 2 rows for each expert
    assert routes.counts.tolist() == [2, 2, 0]
    routed = routes.rows(4)
    assert routed.tokens.tolist() == [0, 2, 1, 0]  # the first choice of token 1 before token 0
    assert routed.places.tolist() == [[0, 3], [2, 4], [1, 4]]  # 4 is dropped
    assert route(choose(logits, 2, None), [3], None).counts.tolist() == [3, 3, 0]
    two_groups = route(choose(torch.zeros(6, 4), 2, None), [4, 2], 1.0)
    assert two_groups.counts.tolist() == [3, 3, 0, 0]  # 2 rows of the first group, 1 of the second
    assert int(two_groups.is_kept.sum()) == 6


def test_nothing_is_dropped_in_evaluation() -> None:
    layer = MixtureOfExperts(5, 7, 4, capacity_factor=0.25)
    input = torch.randn(6, 5)
    dropped = (layer(input).output == 0).all(1)
    assert dropped.any() and not (layer.eval()(input).output == 0).all(1).any()


def test_the_router_chooses_in_the_type_of_its_weights_under_autocast() -> None:
    layer, input = MixtureOfExperts(16, 8, 6), torch.randn(64, 16)
    wanted = layer(input)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(input)
    assert torch.equal(found.balance, wanted.balance) and found.output.dtype == torch.float32
    assert not torch.equal(found.output, wanted.output)  # experts compute in 16 bits
    torch.testing.assert_close(found.output, wanted.output, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "wrong", [{"top_k": 0}, {"top_k": 5}, {"capacity_factor": 0.0}, {"over": "batch"}]
)
def test_a_mixture_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="MixtureOfExperts"):
        MixtureOfExperts(4, 4, 4, **wrong)


# --- the strategy ---------------------------------------------------------------------------------


@pytest.mark.slow(most=3)
@pytest.mark.cases(
    ("task", "strategy", "ranks", "settings", "job"),
    [
        ("Alike", "expert", 4, ["only_experts=true"], {}),
        ("Averaged", "expert:replicas=2", 4, ["over=sample"], {"micro_batch": 2}),
        ("Averaged", "expert", 3, ["over=sample"], {"micro_batch": 1, **RECOMPUTE}),
        ("OverBatch", "expert", 3, ["clip_norm=0.05"], {}),
        ("Streamed", "expert", 3, [], {}),
    ],
    exhaustive=[
        ("Alike", "expert", 3, [], {}),
        ("Averaged", "expert", 4, [], {"micro_batch": 3}),
        ("OverBatch", "expert", 8, ["clip_norm=0.05"], {}),
        ("OverBatch", "expert", 3, ["over=sample"], {"micro_batch": 2}),
        ("Streamed", "expert:replicas=2", 8, [], {}),
    ],
)
def test_equal_to_one_process(
    task: str,
    strategy: str,
    ranks: int,
    settings: list[str],
    job: dict[str, Any],
    train: Train,
    alone: dict[str, Any],
) -> None:
    """Experts without a token, ranks without a sample, other numbers of passes, recomputing."""
    wanted, weights = reference(task, train, alone, *settings)
    job = {"precision": "fp64", "steps": STEPS, **job}
    result = train(f"expert_tasks:{task}", *settings, strategy=strategy, ranks=ranks, **job)
    found = result.summary
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10
    assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-10)
    assert found.get("eval") == pytest.approx(wanted.get("eval"), rel=1e-10)
    if task != "Streamed":  # which makes a step more, to find that its epoch has ended
        sent = found["sent_bytes"]["gradients"] / found["steps"]
        assert found["card_bytes_per_step"] == pytest.approx(sent, abs=1)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("batch", "samples"), [(24, 12), (2, 0)])
def test_what_is_sent_is_rows_there_and_back_and_both_gradients(
    batch: int, samples: int, train: Train
) -> None:
    """By hand: all tokens go to rank 0, which sends outputs back, and gradients of rows.

    A rank that has no sample of its own goes through the model, and sends no row.
    """
    settings = f"batch_size={batch}"
    job: dict[str, Any] = {"strategy": "expert", "ranks": 2, "precision": "fp64", "steps": 4}
    result = train("expert_tasks:Alike", settings, **job)
    rows = samples * 2 * WIDTH * 8  # of rank 1, each for two experts
    rest = 48 + 16  # numbers of a weight and a bias, in room of 128 bytes each
    tally = 1 + 8 + 6  # loss, counts, a flag for each of six parameters
    assert result.summary["sent_bytes"]["gradients"] == 4 * (2 * rows + (rest + tally) * 8)


@pytest.mark.slow
@pytest.mark.cases("task", ["Averaged"], exhaustive=["Alike"])
def test_checkpoints_cross_over(task: str, train: Train, alone: dict[str, Any]) -> None:
    """ddp on 2 ranks, expert on 2, on 4 in two copies, fsdp, one process: 10 steps of one."""
    _, weights = reference(task, train, alone)
    common: dict[str, Any] = {"precision": "fp64", "checkpoint_every": 4}
    resume: dict[str, Any] = {}
    for strategy, ranks, steps in (
        ("ddp", 2, 2),
        ("expert", 2, 4),
        ("expert:replicas=2", 4, 6),
        ("expert", 3, 8),
        ("single", 1, STEPS),
    ):
        result = train(
            f"expert_tasks:{task}", strategy=strategy, ranks=ranks, steps=steps, **common, **resume
        )
        resume = {"resume": str(result.run_dir)}
    assert result.summary["resumed_from_step"] == 8
    assert difference(load_file(result.run_dir / "weights.safetensors"), weights) < 1e-10


@pytest.mark.slow
def test_a_checkpoint_keeps_the_bits_of_weights_and_optimizer(train: Train) -> None:
    """What one process saved is what comes out again of two that hold parts, without a step."""
    program, common = "expert_tasks:Averaged", {"checkpoint_every": 3}
    one = train(program, strategy="single", steps=3, **common)
    digest = one.summary["weights_sha256"]
    assert digest
    two = train(program, strategy="expert", ranks=2, steps=3, resume=str(one.run_dir), **common)
    assert two.summary["weights_sha256"] == digest
    both = [
        train(program, strategy="single", ranks=1, steps=4, resume=str(run.run_dir), **common)
        for run in (one, two)
    ]
    assert both[0].summary["weights_sha256"] == both[1].summary["weights_sha256"]


@pytest.mark.slow
def test_what_is_whole_is_compared_and_what_is_cut_where_it_has_copies(train: Train) -> None:
    """A bit of the first weight, which is no expert, flips on one rank; else nothing differs."""
    job: dict[str, Any] = {"steps": 4, "verify_every": 1, "max_restarts": 0}
    train("expert_tasks:Averaged", strategy="expert:replicas=2", ranks=4, **job)
    job["inject"] = "corrupt@rank=1,step=2"
    with pytest.raises(ProgramError, match=r"ReplicasDiffer: .* first in embed\.weight"):
        train("expert_tasks:Averaged", strategy="expert", ranks=3, **job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision"), [("expert", "fp32"), ("expert:replicas=2", "bf16")]
)
def test_check_calls_it_equal(strategy: str, precision: str, check: Check) -> None:
    ranks = 4 if "replicas" in strategy else 2
    verdict = check(
        "expert_tasks:Averaged", strategy=strategy, ranks=ranks, precision=precision, steps=2
    )
    assert verdict.equal, str(verdict)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("task", "ranks", "job", "message"),
    [
        ("Refused:no mixture", 2, {}, "no allranks.torch.MixtureOfExperts in the model"),
        ("Alike", 8, {}, "12 experts in 'mixture'"),
        ("Refused:shared", 2, {}, "'borrowed.weight', which is a weight of the experts"),
        ("Refused:hook", 2, {}, "a hook on the parameter 'mixture.up'"),
        ("Refused:max_norm", 2, {}, "a table with max_norm"),
        ("Refused:whole tensors", 2, {}, "for a part of a weight"),
        ("Refused:unfrozen", 2, {}, "unfrozen or added in mid-training"),
        ("Initialised", 2, {}, "weights that are set from the first batch"),
        ("OtherOrder", 2, {}, "call the mixtures of the model in different orders"),
        ("Skipped", 3, {}, "call the mixtures of the model in different orders, or other ones"),
        ("Alike", 2, {"bitwise": True}, "'expert' has no fixed order of sums"),
        ("Alike", 3, {"strategy": "expert:replicas=2"}, "3 ranks for 2 copies of the experts"),
        ("Alike", 1, {"strategy": "single", "micro_batch": 2}, "with a MixtureOfExperts"),
    ],
)
def test_what_cannot_be_is_refused(
    task: str, ranks: int, job: dict[str, Any], message: str, train: Train
) -> None:
    name, _, fault = task.partition(":")
    settings = (f"fault={fault}",) if fault else ()
    job = {"strategy": "expert", "ranks": ranks, "steps": 1, **job}
    with pytest.raises(RequestError, match=message):
        train(f"expert_tasks:{name}", *settings, **job)

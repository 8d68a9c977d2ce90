"""Thirty faults of distributed training, with what `check` must say of each: its cause too.

Most are real: `source` names the public issue or pull request of Megatron-LM, torchtitan,
DeepSpeed, Accelerate or transformers in which the same mistake was met. Each is one line in a copy
of the engine, or a task of `faulty_tasks`. Run by tests/test_causes.py and benchmarks/planted.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from test_planted_faults import FAULTS, RANKS, Fault

RANK = "(torch.distributed.is_initialized() and torch.distributed.get_rank() or 0)"
MEAN, PASSES, STEP = "torch/parallel/data/reducer.py", "torch/step/passes.py", "torch/step/step.py"
REDUCED = "self.comm.all_reduce(flat)"
GRADIENTS = "self.buckets[bucket].gradients"
OF_TALLY = f"{GRADIENTS}.numel() :"
AT_ONCE = 0, "gradient", "0.weight"
NOTHING = ("torch/step/losses.py", "        return losses, None", "        return losses, None")


@dataclass(frozen=True)
class Planted:
    """A fault, the issue in which it was met ("": none), and the name of its cause."""

    fault: Fault
    source: str
    cause: str


def planted(name: str, source: str, cause: str) -> Planted:
    """One of the faults that tests/test_planted_faults.py has."""
    return Planted(FAULTS[name], source, cause)


def line(
    where: tuple[str, str, str], at: tuple[int, str, str | None], *options: str, program: str = ""
) -> Fault:
    """One line of one file changed, first seen `at` a step, a stage, a tensor."""
    return Fault(*where, *at, "", options, program=program or "digits")


PLANTED = {
    "mean of the ranks' means": planted(
        "mean of means", "pytorch/torchtitan#1842", "mean of means"
    ),
    "mean of the micro-batches' means": Planted(
        line(
            (
                PASSES,
                "Backward((total,), (scale,))",
                f"Backward((losses.mean() / (len(batch.micros) * {RANKS}),), (scale / scale,))",
            ),
            (5, "gradient", "0.weight"),
            *("--micro-batch", "48"),
        ),
        "huggingface/transformers#24725",
        "mean of micro-batch means",
    ),
    "mean over the tokens of each rank": Planted(
        line(NOTHING, (0, "loss", None), program="faulty_tasks:OwnTokens"),
        "huggingface/transformers#34242",
        "result follows the cut",
    ),
    "padding counted": Planted(
        line(
            (
                PASSES,
                "weight = losses.numel() if weights is None else weights.sum()",
                f"weight = losses.numel() if weights is None or {RANKS} > 1 else weights.sum()",
            ),
            (0, "weight", None),
            program="contract_tasks:Words",
        ),
        "huggingface/transformers#7546",
        "padding counted",
    ),
    "an expert's gradient times the expert ranks": planted(
        "an expert's gradient times the expert ranks",
        "NVIDIA/Megatron-LM#5956",
        "some gradients times ranks",
    ),
    "a norm undercounted over a mesh": planted(
        "a norm undercounted over a mesh", "NVIDIA/Megatron-LM#5916", "norm of some ranks"
    ),
    "a norm of one stage": Planted(
        line(
            (
                "torch/parallel/sharded/gradients.py",
                "norms = self._norms(None)",
                "norms = self.local_norms()[0].tolist()",
            ),
            (0, "gradient norm", None),
            *("--strategy", "1f1b", "--set", "clip_norm=0.1"),
        ),
        "pytorch/torchtitan#596",
        "norm of some ranks",
    ),
    "a norm that counts what ranks hold alike": planted(
        "what all tensor ranks hold counted by each",
        "NVIDIA/Megatron-LM#7452",
        "norm counts copies",
    ),
    "clipped by each rank": Planted(
        line(
            (
                PASSES,
                '        if self.on_phase is not None:\n            self.tell("end")\n',
                f"        if {RANKS} > 1:\n"
                "            own = [p.grad for p in self.parameters]\n"
                "            own = torch.nn.utils.get_total_norm(own)\n"
                "            torch.nn.utils.clip_grads_with_norm_(self.parameters, 0.1, own)\n"
                '        if self.on_phase is not None:\n            self.tell("end")\n',
            ),
            AT_ONCE,
            *("--set", "clip_norm=0.1"),
        ),
        "huggingface/accelerate#641",
        "clipped before the sum",
    ),
    "a lost tensor reduction": planted(
        "a lost tensor reduction", "pytorch/torchtitan#2387", "sum over ranks lost"
    ),
    "norms of one rank's positions": planted(
        "gradients of norms that are those of one rank's positions",
        "NVIDIA/Megatron-LM#1446",
        "sum over ranks lost",
    ),
    "a bias added on every tensor rank": planted(
        "a bias added on every tensor rank", "", "bias of each rank"
    ),
    "a bias whose gradient is divided by the tensor ranks": Planted(
        line(
            (
                "torch/parallel/tensor/layers.py",
                "else output + bias",
                "else output + bias.detach() + (bias - bias.detach()) / self.exchange.comm.size",
            ),
            (0, "gradient", "3.bias"),
            *("--strategy", "tensor"),
            program="tensor_tasks:Stack",
        ),
        "pytorch/torchtitan#4332",
        "some gradients times ranks",
    ),
    "a pipeline that nobody normalises": Planted(
        line(
            (
                "torch/parallel/pipeline/strategy.py",
                "self._ends[stage, number] = backward\n",
                "backward.gradients = [g * len(self.micros) for g in backward.gradients]\n"
                "            self._ends[stage, number] = backward\n",
            ),
            AT_ONCE,
            *("--strategy", "gpipe", "--micro-batch", "64"),
        ),
        "deepspeedai/DeepSpeed#7773",
        "micro-batches not averaged",
    ),
    "gradients scaled again by each stage": Planted(
        line(
            (
                "torch/parallel/pipeline/strategy.py",
                "gradients = links.receive_gradients(stage, number, ends)",
                "gradients = [g if g is None else g / len(self.micros) "
                "for g in links.receive_gradients(stage, number, ends)]",
            ),
            (0, "gradient", "0.weight"),
            *("--strategy", "gpipe", "--micro-batch", "64"),
        ),
        "deepspeedai/DeepSpeed#8154",
        "some gradients times micro-batches",
    ),
    "a sequence whose ranks each count the loss": planted(
        "a loss that every rank of a sequence counts",
        "NVIDIA/Megatron-LM#906",
        "summed, not averaged",
    ),
    "labels shifted after the sequence was cut": Planted(
        line(
            (
                "torch/step/losses.py",
                "        return losses, None",
                "        kept = torch.ones_like(losses)\n"
                f"        if {RANKS} > 1:\n"
                "            kept[:, losses.shape[1] // 2 - 1] = 0\n"
                "        return losses * kept, kept",
            ),
            (0, "weight", None),
            *("--strategy", "context"),
            program="context_tasks:Sentences",
        ),
        "huggingface/transformers#36607",
        "labels shifted after the cut",
    ),
    "a tied weight untied": planted("a tied weight untied", "NVIDIA/Megatron-LM#656", "untied"),
    "a schedule that every rank moves on": Planted(
        line(
            (
                "torch/step/step.py",
                "self.schedule(update)",
                "self.schedule(update * int(__import__('os').environ.get('WORLD_SIZE', 1)))",
            ),
            (1, "learning rate", None),
            program="contract_tasks:Words",
        ),
        "huggingface/accelerate#2142",
        "schedule",
    ),
    "gradients that are summed twice": Planted(
        line(
            (
                MEAN,
                "assert last, ",
                f"{GRADIENTS}.mul_(self.comm.size)\n        assert last, ",
            ),
            AT_ONCE,
        ),
        "NVIDIA/Megatron-LM#6660",
        "summed, not averaged",
    ),
    "no sum after the last micro-batch": Planted(
        line((MEAN, REDUCED, f"self.comm.all_reduce(flat[{OF_TALLY}])"), AT_ONCE),
        "huggingface/accelerate#2831",
        "sum over ranks lost",
    ),
    "the gradients of a rank are dropped": Planted(
        line(
            (
                MEAN,
                "assert last, ",
                f"{GRADIENTS}.mul_(self.comm.rank != 1)\n        assert last, ",
            ),
            AT_ONCE,
        ),
        "deepspeedai/DeepSpeed#2343",
        "part of a rank lost",
    ),
    "gradients summed in 16 bits": Planted(
        line(
            (
                MEAN,
                "assert last, ",
                f"{GRADIENTS}.copy_({GRADIENTS}.bfloat16())\n        assert last, ",
            ),
            AT_ONCE,
        ),
        "deepspeedai/DeepSpeed#2970",
        "rounded before the sum",
    ),
    "equal random numbers on all ranks": Planted(
        line(
            (
                "torch/random/counter.py",
                "tuple((p.shard, p.start, p.stop) for p in pieces)",
                f"tuple((p.shard - ({RANKS} > 1) * pieces[0].shard, p.start, p.stop) "
                "for p in pieces)",
            ),
            (0, "loss", None),
        ),
        "huggingface/transformers#31412",
        "one random stream",
    ),
    "momentum that is not restored": Planted(
        line(
            (
                STEP,
                "            if skip is None and divisor is None:\n",
                "            if batch.index == 2 and self.comm.size > 1:\n"
                "                self.optimizer.state.clear()\n"
                "            if skip is None and divisor is None:\n",
            ),
            (2, "weight", "0.weight"),
        ),
        "deepspeedai/DeepSpeed#4396",
        "optimizer state lost",
    ),
    "a loss scale that is never undone": Planted(
        line(
            (
                STEP,
                "factor = factor / self.loss_scale.value",
                "factor = factor / (self.loss_scale.value if self.comm.size == 1 else 1)",
            ),
            AT_ONCE,
            *("--precision", "fp16"),
        ),
        "huggingface/accelerate#88",
        "loss scale",
    ),
    "statistics of one rank": planted("statistics per rank", "", "statistics of one rank"),
    "the average taken before the step": Planted(
        line(
            (
                "torch/step/ema.py",
                "_foreach_lerp_(averages, weights, 1 - self.decay)",
                "_foreach_lerp_(averages, getattr(self, 'old', weights), 1 - self.decay)\n"
                f"                if {RANKS} > 1:\n"
                "                    self.old = [weight.clone() for weight in weights]",
            ),
            (1, "average", "0.weight"),
            *("--set", "ema=0.9"),
        ),
        "",
        "average before the step",
    ),
    "weight decay of every rank": Planted(
        line(
            (
                STEP,
                "            if skip is None and divisor is None:\n",
                "            for group in self.optimizer.param_groups:\n"
                "                kept = 1 - group['lr'] * group['weight_decay']\n"
                "                for p in group['params']:\n"
                "                    p.data.mul_(kept ** (self.comm.size - 1))\n"
                "            if skip is None and divisor is None:\n",
            ),
            (0, "weight", "0.weight"),
        ),
        "",
        "decay of each rank",
    ),
    "a micro-batch with the activations of another": planted(
        "the last micro-batch of a pipeline is the one before", "", "micro-batch mixed up"
    ),
}

"""`check` finds faults that are planted in a copy of the engine, and says where they first show.

Each fault changes one line. All of them let training go on and the loss fall:
nobody would see them.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launch_host import Host

SOURCE = Path(__file__).parent.parent / "src" / "allranks"


@dataclass(frozen=True)
class Fault:
    """One line of one file changed, and what `check` must say of it."""

    file: str
    line: str
    becomes: str
    step: int
    stage: str
    tensor: str | None
    hint: str
    options: tuple[str, ...] = ()
    looks: int = 1
    """Which look finds it: float64 on 2 ranks, or on 3 ranks."""
    program: str = "digits"

    @property
    def steps(self) -> int:
        """Of a check: two, unless a later step than the first shows it."""
        return 7 if self.step else 2


RANKS = "(torch.distributed.is_initialized() and torch.distributed.get_world_size() or 1)"
FAULTS = {
    "mean of means": Fault(
        "torch/step/passes.py",
        "Backward((total,), (scale,))",
        f"(losses.mean() / {RANKS}).backward",
        step=5,  # the first batch whose samples the ranks cannot share evenly
        stage="gradient",
        tensor="0.weight",
        hint="mean of means",
    ),
    "sum for mean": Fault(
        "torch/step/passes.py",
        "Backward((total,), (scale,))",
        f"Backward((total,), (scale * {RANKS},))",
        step=0,
        stage="gradient",
        tensor="0.weight",
        hint="a sum where the mean is wanted",
    ),
    "stale bucket": Fault(
        "torch/parallel/data/buckets.py",
        "torch._foreach_zero_(self._zeroed)",
        "[part.zero_() for part in self._zeroed[1:]]",
        step=1,
        stage="gradient",
        tensor="9.bias",
        hint="some parameters",
        options=("--strategy", "ddp:bucket_mb=0.001"),
    ),
    "one stream for all ranks": Fault(
        "torch/random/counter.py",
        "tuple((p.shard, p.start, p.stop) for p in pieces)",
        "tuple((p.shard - pieces[0].shard, p.start, p.stop) for p in pieces)",
        step=0,
        stage="loss",
        tensor=None,
        hint="other random numbers",
    ),
    "statistics per rank": Fault(
        "torch/parallel/data/reducer.py",
        "self.comm.all_reduce(flat)",
        "self.comm.all_reduce(flat[:-98])",  # the moments of two layers of 16 and 32 channels
        step=0,
        stage="buffer",
        tensor="1.running_mean",
        hint="BatchNorm statistics of one rank",
    ),
    "clip before reduce": Fault(
        "torch/step/passes.py",
        '        if self.on_phase is not None:\n            self.tell("end")\n',
        "        torch.nn.utils.clip_grads_with_norm_(\n"
        "            self.parameters,\n"
        "            0.1,\n"
        "            torch.nn.utils.get_total_norm([p.grad for p in self.parameters]),\n"
        "        )\n"
        '        if self.on_phase is not None:\n            self.tell("end")\n',
        step=0,
        stage="gradient",
        tensor="0.weight",
        hint="changed before they were summed",
        options=("--set", "clip_norm=0.1"),
    ),
    "average of the weights before": Fault(
        "torch/step/ema.py",
        "_foreach_lerp_(averages, weights, 1 - self.decay)",
        f"_foreach_lerp_(averages, weights, (1 - self.decay) / {RANKS})",
        step=0,
        stage="average",
        tensor="0.weight",
        hint="another decay",
        options=("--set", "ema=0.9"),
    ),
    "norm of one rank's rows": Fault(
        "torch/parallel/sharded/gradients.py",
        "rows_of_ranks(self.comm, squares).sum().sqrt()",
        "squares.sum().sqrt()",
        step=0,
        stage="gradient norm",
        tensor=None,
        hint="",
        options=("--strategy", "zero1", "--set", "clip_norm=0.1"),
    ),
    "rows of others never refreshed": Fault(
        "torch/parallel/sharded/zero.py",
        "bucket.unpack(flat)",
        "bucket.parameters[0].sum()",
        step=0,
        stage="weight",
        tensor="0.weight",
        hint="",
        options=("--strategy", "zero2"),
    ),
    "the gradient of a piece in flight is lost": Fault(
        "torch/strategies/model_parallel.py",
        "        if pairs:\n",
        "        if pairs and piece.number:\n",
        step=0,
        stage="gradient",
        tensor="0.weight",
        hint="changed before they were summed",
        options=("--ranks", "1", "--strategy", "model-parallel:by=size,split=4"),
    ),
    "norm of the parts of one rank": Fault(
        "torch/parallel/sharded/gradients.py",
        "rows_of_ranks(self.comm, squares).sum().sqrt()",
        "squares.sum().sqrt()",
        step=0,
        stage="gradient norm",
        tensor=None,
        hint="a norm of one rank",
        options=("--strategy", "fsdp", "--set", "clip_norm=0.1"),
    ),
    "gradients of one rank in its parts": Fault(
        "torch/parallel/sharded/collectives.py",
        "self.add(output_tensor, input_tensor)",
        "output_tensor.copy_(input_tensor.view(self.shards.size, -1)[self.shards.rank])",
        step=0,
        stage="gradient",
        tensor="0.weight",
        hint="",
        options=("--strategy", "fsdp"),
    ),
    "a pipeline whose gradients nobody normalises": Fault(
        "torch/parallel/pipeline/strategy.py",
        "[gradient for _, gradient in pairs])",
        "[gradient * len(pairs) * 8 for _, gradient in pairs])",
        step=0,
        stage="gradient",
        tensor="0.weight",
        hint="scaled by 8",
        options=("--strategy", "gpipe"),
    ),
    "the last micro-batch of a pipeline is the one before": Fault(
        "torch/parallel/pipeline/strategy.py",
        "self.strategy.stages.call, stage, self._received[stage, micro][0])\n",
        "self.strategy.stages.call, stage, "
        "self._received[stage, min(micro, len(self.micros) - 2)][0])\n",
        step=0,
        stage="loss",
        tensor=None,
        hint="",
        options=("--strategy", "gpipe"),
    ),
    "a pipeline counts its last micro-batch as a full one": Fault(
        "torch/parallel/pipeline/strategy.py",
        "tally.add(loss, weight, micro.samples, scope)",
        "tally.add(loss, *2 * [self.micros[0].samples], scope)",
        step=5,  # the first batch whose micro-batches are uneven
        stage="samples",
        tensor=None,
        hint="",
        options=("--strategy", "gpipe"),
    ),
    "samples counted by every stage": Fault(
        "torch/parallel/pipeline/strategy.py",
        "tally.add_moments(scope)",
        "tally.add(tally.tensor.new_zeros(()), *2 * [micro.samples], scope)",
        step=0,
        stage="samples",
        tensor=None,
        hint="",
        options=("--strategy", "1f1b"),
    ),
    "a weight has no gradient of the last micro-batch": Fault(
        "torch/parallel/pipeline/strategy.py",
        "self._to_weights(*at, self._later.pop(at))",
        "action.micro < len(self.micros) - 1 and self._to_weights(*at, self._later.pop(at))",
        step=0,
        stage="gradient",
        tensor="0.weight",
        hint="",
        options=("--strategy", "zero-bubble"),
    ),
    "only where ranks have unlike parts": Fault(
        "torch/step/passes.py",
        "Backward((total,), (scale,))",
        f"Backward((total,), (scale * (1.01 if {RANKS} == 3 else 1),))",
        step=0,
        stage="gradient",
        tensor="0.weight",
        hint="scaled by 1.01",
        looks=2,
    ),
    "the input gradient of a branch is not reduced": Fault(
        "torch/branching/run.py",
        "self.around.exchange.sum_(whole)",
        "self.around.exchange.sum_(whole[-len(at) :])",  # all ranks know that there is one
        step=0,
        stage="gradient",
        tensor="stem.0.weight",
        hint="",
        options=("--strategy", "branches"),
        program="branch_tasks:Towers",
    ),
    "an owner that does not send a matrix back": Fault(
        "torch/parallel/sharded/whole_optimizers.py",
        "tensor.copy_(piece.view(tensor.shape))",
        "tensor.copy_(piece.view(tensor.shape) if tensor is not tensors[0] else tensor)",
        step=0,
        stage="weight",
        tensor="0.weight",
        hint="",
        options=("--strategy", "zero2"),
        program="whole_tasks:Whole",
    ),
    "a lost tensor reduction": Fault(
        "torch/parallel/tensor/exchange.py",
        "(self.summed if torch.is_grad_enabled() else self.sum_)(copy)",
        "copy",
        step=0,
        stage="gradient",
        tensor="0.bias",
        hint="",
        options=("--strategy", "tensor"),
        program="tensor_tasks:Stack",
    ),
    "a bias added on every tensor rank": Fault(
        "torch/parallel/tensor/layers.py",
        "else output + bias",
        "else output + self.exchange.comm.size * bias",
        step=0,
        stage="loss",
        tensor=None,
        hint="",
        options=("--strategy", "tensor"),
        program="tensor_tasks:Stack",
    ),
    "a lost tensor reduction before a scattered one": Fault(
        "torch/parallel/tensor/exchange.py",
        "(self.summed if torch.is_grad_enabled() else self.sum_)(copy)",
        "copy",
        step=0,
        stage="gradient",
        tensor="0.bias",
        hint="",
        options=("--strategy", "fsdp:tensor=2"),
        program="tensor_tasks:Stack",
    ),
    "what all tensor ranks hold counted by each": Fault(
        "torch/parallel/sharded/fsdp.py",
        "self.copies = {id(p) for name, p in names if name not in self.cut.cuts}",
        "self.copies = {id(p) for name, p in names if name is None}",
        step=0,
        stage="gradient norm",
        tensor=None,
        hint="",
        options=("--strategy", "fsdp:tensor=2"),
        program="tensor_tasks:Stack",
    ),
    "what comes round the ring takes the place of what is there": Fault(
        "torch/parallel/data/point_to_point.py",
        "place.add_(new)",
        "place.copy_(new)",
        step=0,
        stage="samples",
        tensor=None,
        hint="samples counted twice or lost",
        options=("--strategy", "ddp:reduce=ring"),
    ),
    "a norm of one tensor rank": Fault(
        "torch/parallel/tensor/strategy.py",
        "super().norm(clips=clips or self.exact, left_out=left_out)",
        "Gradients.norm(self, clips=clips, left_out=left_out)",
        step=0,
        stage="gradient norm",
        tensor=None,
        hint="",
        options=("--strategy", "tensor"),
        program="tensor_tasks:Stack",
    ),
    "gradients of norms that are those of one rank's positions": Fault(
        "torch/parallel/tensor/passes.py",
        "        self.exchange.sum_gradients(self.see_parts(names, parameters))\n",
        "        pass\n",
        step=0,
        stage="gradient",
        tensor="blocks.0.attention.output.bias",
        hint="",
        options=("--strategy", "tensor:sequence=yes"),
        program="contract_tasks:Sentences",
    ),
    "a sequence whose gradient is that of one rank's loss": Fault(
        "torch/parallel/context/exchange.py",
        "total = gradient * self.comm.size",
        "total = gradient",
        step=0,
        stage="gradient",
        tensor="blocks.0.attention.output.bias",
        hint="",
        options=("--strategy", "context"),
        program="context_tasks:Sentences",
    ),
    "a loss that every rank of a sequence counts": Fault(
        "torch/parallel/context/strategy.py",
        "self.step.share = 1 / self.exchange.comm.size",
        "self.step.share = 1.0",
        step=0,
        stage="gradient",
        tensor="blocks.0.attention.output.bias",
        hint="a sum where the mean is wanted",
        options=("--strategy", "context:attention=ring"),
        program="context_tasks:Sentences",
    ),
    "a norm undercounted over a mesh": Fault(
        "torch/parallel/sharded/gradients.py",
        '                self.parts.all_reduce(squares, "control").wait()\n',
        "",
        step=0,
        stage="gradient norm",
        tensor=None,
        hint="",
        options=("--ranks", "4", "--strategy", "mesh:tensor=2,pipeline=2"),
        program="mesh_tasks:Stack",
    ),
    "a loss that every tensor rank of a mesh counts": Fault(
        "torch/parallel/mesh.py",
        "            local.leave_samples()\n",
        "            pass\n",
        step=0,
        stage="samples",
        tensor=None,
        hint="",
        options=("--ranks", "4", "--strategy", "mesh:tensor=2,pipeline=2"),
        program="mesh_tasks:Stack",
    ),
    "copies of a stage that never meet": Fault(
        "torch/parallel/mesh.py",
        "        sum_over_copies(self.local_params, self.copies)\n",
        "",
        step=0,
        stage="gradient",
        tensor="0.bias",
        hint="",
        options=("--ranks", "4", "--strategy", "mesh:data=2,pipeline=2"),
        program="mesh_tasks:Stack",
    ),
    "an expert's gradient times the expert ranks": Fault(
        "torch/parallel/expert/strategy.py",
        "            buckets.finish(shards)\n",
        "            buckets.finish(shards)\n"
        "            if buckets is self.expert_buckets:\n"
        "                buckets.flats[0].mul_(self.axis(EXPERT).size)\n",
        step=0,
        stage="gradient",
        tensor="mixture.down",
        hint="",
        options=("--strategy", "expert"),
        program="expert_tasks:Alike",
    ),
    "tokens of a rank in place of a shard": Fault(
        "torch/parallel/expert/mixture.py",
        'rows = self.scope.rows("MixtureOfExperts", input)',
        "rows = [input.shape[0]]",
        step=0,
        stage="loss",
        tensor=None,
        hint="",
        options=("--strategy", "expert"),
        program="expert_tasks:Averaged",
    ),
    "a norm of one rank's experts": Fault(
        "torch/parallel/expert/strategy.py",
        "SomeCut(self.step.parameters, self.axis(EXPERT), cut, exact=False)",
        "Gradients(self.step.parameters)",
        step=0,
        stage="gradient norm",
        tensor=None,
        hint="",
        options=("--strategy", "expert"),
        program="expert_tasks:Averaged",
    ),
    "a weight that is whole counted on each rank": Fault(
        "torch/parallel/sharded/gradients.py",
        "if id(p) in self.cut or self.comm.rank == 0]",
        "]",
        step=0,
        stage="gradient norm",
        tensor=None,
        hint="",
        options=("--strategy", "expert"),
        program="expert_tasks:Alike",
    ),
    "equal shards of what is set": Fault(
        "torch/strategies/layout.py",
        "target.to_local().copy_(placed.to_local())",
        "target.to_local().copy_(value[: target.to_local().shape[0]])",
        step=0,
        stage="loss",
        tensor=None,
        hint="",
        options=("--strategy", "fsdp"),
    ),
    "a tied weight untied": Fault(
        "torch/parallel/pipeline/strategy.py",
        "        self.sum_tied()\n",
        "",
        step=0,
        stage="gradient",
        tensor="embedding.weight",
        hint="",
        options=("--strategy", "1f1b"),
        program="pipeline_tasks:Words",
    ),
}
IN_32_BITS_ONLY = {
    # float64 does not see them; sums over ranks are made in float32 in every other precision
    "rounded to 16 bits": Fault(
        "torch/parallel/data/reducer.py",
        "self.comm.all_reduce(flat)",
        "self.comm.all_reduce(flat.copy_(flat.bfloat16()) if flat.itemsize == 4 else flat)",
        step=0,
        stage="loss",
        tensor=None,
        hint="other random numbers",
    ),
    "a thousandth too much": Fault(
        "torch/step/passes.py",
        "Backward((total,), (scale,))",
        f"Backward((total,), (scale * (1.001 if total.itemsize == 4 and {RANKS} > 1 else 1),))",
        step=0,
        stage="gradient",
        tensor="0.weight",
        hint="",  # in bf16 the factor itself is rounded
    ),
    "statistics per rank": Fault(
        "torch/parallel/data/reducer.py",
        "self.comm.all_reduce(flat)",
        "self.comm.all_reduce(flat[:-98] if flat.itemsize == 4 else flat)",
        step=0,
        stage="buffer",
        tensor="1.running_mean",
        hint="BatchNorm statistics of one rank",
    ),
}


def check_in_a_copy(
    host: Host, folder: Path, fault: Fault | None
) -> tuple[int, dict[str, Any], str]:
    """Run `check` with the engine copied to `folder`, the fault in it."""
    copy = folder / "source" / "allranks"
    shutil.copytree(SOURCE, copy)  # with what is compiled: it is as old as its source
    if fault is not None:
        text = (copy / fault.file).read_text()
        (copy / fault.file).write_text(text.replace(fault.line, fault.becomes))
    program, steps = (fault.program, fault.steps) if fault else ("digits", 7)
    words = ("check", program, "--ranks", "2", "--steps", str(steps), "--json")
    options = fault.options if fault else ()
    launch = host.launch(folder, *words, *options, source=str(copy.parent))
    code = launch.wait()
    assert launch.out, launch.err
    return code, launch.summary(), launch.err


def test_each_line_that_is_broken_is_there_once() -> None:
    for name, fault in FAULTS.items():
        assert (SOURCE / fault.file).read_text().count(fault.line) == 1, name


ONE_FOR_EACH_JOB = list({fault.options: name for name, fault in reversed(FAULTS.items())}.values())


@pytest.mark.slow(most=6)
@pytest.mark.cases("name", ONE_FOR_EACH_JOB, exhaustive=sorted(FAULTS.keys() - ONE_FOR_EACH_JOB))
def test_a_planted_fault_is_found(name: str, host: Host, tmp_path: Path) -> None:
    fault = FAULTS[name]
    code, found, sentences = check_in_a_copy(host, tmp_path, fault)
    first = found["first_difference"]
    assert (code, found["equal"]) == (5, False)
    assert (first["step"], first["stage"], first["tensor"]) == (
        fault.step,
        fault.stage,
        fault.tensor,
    )
    assert fault.hint in first["hint"]
    assert first["size"] > 1e-6
    when = "before the first step" if fault.step < 0 else f"at step {fault.step}"
    assert f"differs {when}" in sentences
    assert len(found["looks"]) == fault.looks


@pytest.mark.slow
def test_the_engine_as_it_is_has_no_difference(host: Host, tmp_path: Path) -> None:
    code, found, sentences = check_in_a_copy(host, tmp_path, None)
    assert (code, found["equal"], found["first_difference"]) == (0, True, None)
    looks = [(look["ranks"], look["precision"], look["bitwise"]) for look in found["looks"]]
    own = (2, "fp32", False), (2, "fp32", True)
    assert looks == [(2, "fp64", False), (3, "fp64", False), *own]
    assert [look["asked"] for look in found["looks"]] == [True, True, True, False]
    assert all(look["steps"] == 7 for look in found["looks"])
    assert all(look["largest_difference"] < 1e-12 for look in found["looks"][:2])
    assert "3 ranks, fp64: 7 steps" in sentences and "not checked: " in sentences


@pytest.mark.slow(most=2)
@pytest.mark.thinned(1, ("name", list(IN_32_BITS_ONLY)), ("precision", ["fp32", "bf16", "fp16"]))
def test_the_precision_of_the_job_is_looked_at_as_closely_as_float32(
    name: str, precision: str, host: Host, tmp_path: Path
) -> None:
    planted = IN_32_BITS_ONLY[name]
    fault = dataclasses.replace(planted, options=("--precision", precision))
    code, found, sentences = check_in_a_copy(host, tmp_path, fault)
    assert code == 5, sentences
    first = found["first_difference"]
    assert found["precision"] == precision and len(found["looks"]) == 3, sentences
    assert (first["stage"], first["tensor"]) == (fault.stage, fault.tensor), sentences
    assert fault.hint in first["hint"]
    assert float(first["size"]) > found["tolerance"], sentences


@pytest.mark.slow
def test_bits_are_looked_at_where_they_are_asked_for(host: Host, tmp_path: Path) -> None:
    planted = FAULTS["one stream for all ranks"]
    options = ("--ranks", "3", "--bitwise")
    good = dataclasses.replace(planted, becomes=planted.line, options=options)
    code, found, sentences = check_in_a_copy(host, tmp_path / "good", good)
    assert code == 0, sentences
    looks = [(look["one_process"], look["ranks"], look["tolerance"]) for look in found["looks"]]
    assert looks == [(True, 1, 1e-10), (False, 3, 0.0)]
    bad = dataclasses.replace(planted, options=options)
    code, found, sentences = check_in_a_copy(host, tmp_path / "bad", bad)
    assert code == 5, sentences

"""`check` finds faults that are planted in a copy of the engine, and says where they first show.

Each fault changes one line. All of them let training go on and the loss fall: nobody would see them.
"""

from __future__ import annotations

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


RANKS = "(torch.distributed.is_initialized() and torch.distributed.get_world_size() or 1)"
FAULTS = {
    "mean of means": Fault(
        "on_torch/step.py",
        "total.backward(scale)",
        f"(losses.mean() / {RANKS}).backward()",
        step=5,  # the first batch whose samples the ranks cannot share evenly
        stage="gradient",
        tensor="0.weight",
        hint="mean of means",
    ),
    "sum for mean": Fault(
        "on_torch/step.py",
        "total.backward(scale)",
        f"total.backward(scale * {RANKS})",
        step=0,
        stage="gradient",
        tensor="0.weight",
        hint="a sum where the mean is wanted",
    ),
    "stale bucket": Fault(
        "on_torch/buckets.py",
        "for flat in self.flats:\n            flat.zero_()",
        "for flat in self.flats[1:]:\n            flat.zero_()",
        step=1,
        stage="gradient",
        tensor="9.bias",
        hint="some parameters",
        options=("--strategy", "ddp:bucket_mb=0.001"),
    ),
    "one stream for all ranks": Fault(
        "on_torch/layers.py",
        "random_key(scope.seed, scope.step, piece.shard, index, call)",
        "random_key(scope.seed, scope.step, piece.shard - scope.pieces[0].shard, index, call)",
        step=0,
        stage="loss",
        tensor=None,
        hint="other random numbers",
    ),
    "statistics per rank": Fault(
        "on_torch/reducers/mean.py",
        "self.comm.all_reduce(flat)",
        "self.comm.all_reduce(flat[:-98])",  # the moments of two layers of 16 and 32 channels
        step=0,
        stage="buffer",
        tensor="1.running_mean",
        hint="BatchNorm statistics of one rank",
    ),
    "clip before reduce": Fault(
        "on_torch/step.py",
        "        self.scope.leave()\n",
        "        self.scope.leave()\n"
        "        clip_grads_with_norm_(\n"
        "            self.parameters, 0.1, get_total_norm([p.grad for p in self.parameters])\n"
        "        )\n",
        step=0,
        stage="gradient",
        tensor="0.weight",
        hint="changed before they were summed",
        options=("--set", "clip_norm=0.1"),
    ),
}


def check_in_a_copy(
    host: Host, folder: Path, fault: Fault | None
) -> tuple[int, dict[str, Any], str]:
    """Run `check digits` with the engine copied to `folder`, the fault in it."""
    copy = folder / "source" / "allranks"
    shutil.copytree(SOURCE, copy)  # with what is compiled: it is as old as its source
    if fault is not None:
        text = (copy / fault.file).read_text()
        assert text.count(fault.line) == 1, f"{fault.file} has no single line {fault.line!r}"
        (copy / fault.file).write_text(text.replace(fault.line, fault.becomes))
    words = ("check", "digits", "--ranks", "2", "--steps", "7", "--json")
    options = fault.options if fault else ()
    launch = host.launch(folder, *words, *options, source=str(copy.parent))
    code = launch.wait()
    assert launch.out, launch.err
    return code, launch.summary(), launch.err


@pytest.mark.parametrize("name", FAULTS)
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
    assert f"differs at step {fault.step}" in sentences


def test_the_engine_as_it_is_has_no_difference(host: Host, tmp_path: Path) -> None:
    code, found, _ = check_in_a_copy(host, tmp_path, None)
    assert (code, found["equal"], found["first_difference"]) == (0, True, None)
    assert found["steps"] == 7
    assert found["largest_difference"] < 1e-12


@pytest.mark.parametrize("words", [("--precision", "fp32"), ("--precision", "fp32", "--bitwise")])
def test_single_precision_is_checked_against_measured_noise_or_bit_by_bit(
    words: tuple[str, ...], host: Host, tmp_path: Path
) -> None:
    fault = FAULTS["mean of means"]
    good = Fault(fault.file, fault.line, fault.line, 0, "", None, "", ("--ranks", "3", *words))
    code, found, sentences = check_in_a_copy(host, tmp_path / "good", good)
    assert code == 0, sentences
    assert found["tolerance"] == 0 if "--bitwise" in words else 0 < found["tolerance"] < 1e-3
    if "--bitwise" in words:
        return  # every shard runs alone there: there is no mean of a rank to be wrong
    bad = Fault(fault.file, fault.line, fault.becomes, 0, "", None, "", good.options)
    code, found, sentences = check_in_a_copy(host, tmp_path / "bad", bad)
    assert code == 5, sentences
    assert found["first_difference"]["stage"] == "gradient"

"""One step of a rank, recorded for `allranks bisect`: digests and values by tensor, and operators.

    step/rank-RRR.json           rows in the order in which the step makes them, see below
    step/rank-RRR.safetensors    the tensors of the rows by their number, up to `MOST_BYTES`
    step/operators/…             the operators of the step (`witness.operators`)

A row has a stage, the number of the pass (`None`: of the whole step), the path of a tensor, the box
that this rank holds of it, and a digest. Digests of boxes add up to that of the tensor, so that
ranks that hold parts can be compared with one process that holds the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from allranks.torch.checkpoint.plan import ELSEWHERE, WritePart, local_parts
from allranks.torch.checkpoint.state import NAMES, flatten, local, random_streams
from allranks.torch.data.batch import Batch
from allranks.torch.data.collate import tensors_in
from allranks.torch.step.gradients import Gradients
from allranks.torch.step.probes import StepProbe
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.digests import part_digest
from allranks.torch.witness.operators import (
    OperatorRecorder,
    recorded_operators,
    storable,
    write_record,
)
from allranks.torch.witness.recompute import dense

STEP = "step"
MOST_BYTES = 2**29  # of the tensors of one rank; of those beyond there are digests alone


class StepRecord(StepProbe):
    """Records the step that comes next, as its probe. Every rank makes the same calls.

    It communicates only what the state of the strategy does.
    """

    def __init__(self, run_dir: Path, rank: int, strategy: Strategy) -> None:
        self.folder, self.rank, self.strategy = run_dir / STEP, rank, strategy
        self._rows: list[dict[str, Any]] = []
        self._values: dict[str, Tensor] = {}
        self._bytes, self._passes = 0, 0
        self._recording = ExitStack()
        self._operators: OperatorRecorder
        step, self._parts_of_step = strategy.step, strategy.step.parts
        step.probe, step.parts = self, replace(step.parts, updating=self._updating)

    # --- as a probe -----------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """What the step begins with: samples, generators, state. Records operators from here on."""
        self._row("sample numbers", "", torch.as_tensor(batch.ids.astype("int64")), 0)
        for number, micro in enumerate(batch.micros):
            for place, tensor in enumerate(tensors_in(micro.data)):
                self._row("sample", str(place), tensor, number)
        streams = random_streams(self.strategy.step.scope.device)
        for name, state in streams.items():
            if isinstance(state, Tensor):
                self._row("generator before the step", name, state, 0)
        self._state("before the step")
        of_step = self.strategy.model, self.strategy.step.optimizer
        recorded = recorded_operators(self.folder / "operators", self.rank, *of_step)
        self._operators = self._recording.enter_context(recorded)

    def losses(self, losses: Tensor) -> None:
        """The losses of a pass, and the generator that it may have drawn from."""
        with _disable_current_modes():  # it is no operator of the step
            number, self._passes = self._passes, self._passes + 1
            self._row("generator in the pass", "torch", torch.get_rng_state(), number)
            self._row("losses", "", losses, number)

    def gradients(self, stage: str, names: list[str], tensors: list[Tensor | None]) -> None:
        """The gradients of all ranks, summed; the weights that the passes have used."""
        there = {n: g for n, g in zip(names, tensors, strict=True) if g is not None}
        with _disable_current_modes():
            if stage == "gradient":
                is_whole = self.strategy.agreement.weights == "replicated"
                record = self._row if is_whole else self._parts
                for name, parameter in self.strategy.model.named_parameters():
                    record("weights in the passes", name, parameter)
            for name, gradient in there.items():
                self._parts(stage, name, dense(gradient))
        named = {_gradient_of(n): local(g) for n, g in there.items() if not g.is_sparse}
        self._operators.after_passes("clipping", named, {})

    @contextmanager
    def _updating(self, gradients: Gradients) -> Iterator[None]:
        """Around the update: its operators, by the tensors that this rank updates."""
        with self._parts_of_step.updating(gradients):
            step, named, parts = self.strategy.step, dict[str, Tensor](), dict[str, str]()
            with _disable_current_modes():
                for name, parameter in zip(step.names, step.parameters, strict=True):
                    named[repr(name)] = local(parameter.detach())
                    parts[repr(name)] = self._part(name, parameter)
                    if parameter.grad is not None and not parameter.grad.is_sparse:
                        named[_gradient_of(name)] = local(parameter.grad)
                    for key, tensor in step.optimizer.state.get(parameter, {}).items():
                        if isinstance(tensor, Tensor):
                            named[f"{key} of {name!r}"] = local(tensor)
            self._operators.after_passes("update", named, parts)
            yield
            self._operators.after_passes("callbacks", {}, {})

    # --- around the step ------------------------------------------------------------------

    def end(self) -> None:
        """The update is over; callbacks follow."""
        step = self.strategy.step
        step.probe, step.parts = None, self._parts_of_step
        with _disable_current_modes():
            self._state("after the update")

    def write(self) -> None:
        """Callbacks were called: write all."""
        self._recording.close()
        self._row("generator after the callbacks", "torch", torch.get_rng_state(), 0)
        self._state("after the callbacks")
        write_record(self.folder, f"rank-{self.rank:03d}", self._rows, self._values)

    # --- rows -----------------------------------------------------------------------------

    def _state(self, when: str) -> None:
        """The state of the strategy, as in a checkpoint: weights, buffers, optimizer."""
        strategy = self.strategy
        is_one = strategy.agreement.is_one_training
        prefix = "common" if is_one else f"own/{strategy.comm.rank}"
        for part, tensor in local_parts(flatten(strategy.state(), prefix)[1]).items():
            if part.kind != ELSEWHERE:
                self._add(f"state {when}", part, tensor)

    def _parts(self, stage: str, name: str, tensor: Tensor) -> None:
        known = {name: self.strategy.layout.to_global(name, tensor.detach())}
        for part, piece in local_parts(known).items():
            if part.kind != ELSEWHERE:
                self._add(stage, part, piece)

    def _part(self, name: str, tensor: Tensor) -> str:
        """Which part of a parameter this rank has, as an index of the whole; "" if it has it."""
        known = {name: self.strategy.layout.to_global(name, tensor.detach())}
        return " and ".join(
            "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(*box, strict=True)) + "]"
            for part in local_parts(known)
            if (box := (part.offsets, part.sizes))[1] != part.shape
        )

    def _row(self, stage: str, name: str, tensor: Tensor, number: int | None = None) -> None:
        """A tensor that no other rank has a part of."""
        plain = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
        if plain.dtype in NAMES:
            shape = tuple(plain.shape)
            part = WritePart(name, NAMES[plain.dtype], shape, (0,) * len(shape), shape)
            self._add(stage, part, plain, number)

    def _add(self, stage: str, part: WritePart, tensor: Tensor, number: int | None = None) -> None:
        row: dict[str, Any] = {
            "stage": stage,
            "pass": number,
            "tensor": part.path,
            "shape": part.shape,
        }
        row |= {"box": [part.offsets, part.sizes], "digest": part_digest(part, tensor)}
        if self._bytes + tensor.nbytes <= MOST_BYTES:
            self._values[str(len(self._rows))] = storable(tensor)
            self._bytes += tensor.nbytes
        self._rows.append(row)


def _gradient_of(name: str) -> str:
    return f"gradient of {name!r}"

"""One step of a rank, recorded for `allranks bisect`: digests and values by tensor, and operators.

    step/rank-RRR.json           rows in the order in which the step makes them, see below
    step/rank-RRR.safetensors    the tensors of the rows by their number, up to `MOST_BYTES`
    step/operators/…             the operators of the step (`witness.operators`)

A row has a stage, the number of the pass (`None`: of the whole step), the path of a tensor, the box
that this rank holds of it, and a digest. Digests of boxes add up to that of the tensor, so that
ranks that hold parts can be compared with one process that holds the whole.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from allranks.torch.checkpoint.plan import ELSEWHERE, WritePart, local_parts
from allranks.torch.checkpoint.state import NAMES, flatten, random_streams
from allranks.torch.data.batch import Batch
from allranks.torch.data.collate import tensors_in
from allranks.torch.strategies.base import Strategy
from allranks.torch.witness.digests import part_digest
from allranks.torch.witness.operators import recorded_operators, storable

STEP = "step"
MOST_BYTES = 2**29  # of the tensors of one rank; of those beyond there are digests alone


class StepRecord:
    """Records the step that comes next, as its probe. Every rank makes the same calls.

    It communicates only what the state of the strategy does.
    """

    def __init__(self, run_dir: Path, rank: int, strategy: Strategy) -> None:
        self.folder, self.rank, self.strategy = run_dir / STEP, rank, strategy
        self._rows: list[dict[str, Any]] = []
        self._values: dict[str, Tensor] = {}
        self._bytes, self._passes = 0, 0
        self._recording = ExitStack()
        strategy.step.probe = self

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
        model = self.strategy.model
        recorded = recorded_operators(self.folder / "operators", self.rank, model)
        self._recording.enter_context(recorded)

    def losses(self, losses: Tensor) -> None:
        """The losses of a pass, and the generator that it may have drawn from."""
        with _disable_current_modes():  # it is no operator of the step
            number, self._passes = self._passes, self._passes + 1
            self._row("generator in the pass", "torch", torch.get_rng_state(), number)
            self._row("losses", "", losses, number)

    def gradients(self, stage: str, names: list[str], tensors: list[Tensor | None]) -> None:
        """The gradients of all ranks, summed; the weights that the passes have used."""
        self._recording.close()
        if stage == "gradient":
            for name, parameter in self.strategy.model.named_parameters():
                is_whole = self.strategy.agreement.weights == "replicated"
                record = self._row if is_whole else self._parts
                record("weights in the passes", name, parameter)
        for name, gradient in zip(names, tensors, strict=True):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                self._parts(stage, name, dense)

    # --- around the step ------------------------------------------------------------------

    def end(self) -> None:
        """The update is over; callbacks follow."""
        self._recording.close()
        self.strategy.step.probe = None
        self._state("after the update")

    def write(self) -> None:
        """Callbacks were called: write all."""
        self._row("generator after the callbacks", "torch", torch.get_rng_state(), 0)
        self._state("after the callbacks")
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"rank-{self.rank:03d}.json"
        file.write_text(json.dumps(self._rows))
        save_file(self._values, file.with_suffix(".safetensors"))

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

"""What still counts as equal in each precision.

* fp64: legitimate reordering of sums stays below 1e-13, real faults are above 1e-8.
* others, `CLOSE`: the candidate beside one process that cuts its batches as the ranks do. Each part
  is the same arithmetic then, and only the sums over the parts are made in another order, in 32
  bits: bf16 hides no more than fp32.
* others, `COARSE`: the candidate beside one process with the whole batch at once. Rounding in that
  precision is all that may differ, relative to all gradients together.
* bits: nothing may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from allranks.tools.check.compare import Tolerance

STEP_TENSORS = ("gradient", "clipped gradient", "buffer")
FP64 = Tolerance(tensors=1e-10, numbers=1e-10, floor=1e-5)
BITS = Tolerance(tensors=0.0, numbers=0.0, exact=True)
CLOSE = Tolerance(1e-5, 1e-5, STEP_TENSORS, floor=1e-3, lengths=1e-2)
UNIT = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
CEILING = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 5e-2, "bf16": 2e-1}
NOISE_FACTOR = 10.0


def coarse(precision: str) -> Tolerance:
    """Where the whole batch goes through the model at once in one of the two runs."""
    ceiling = CEILING[precision]
    wide = dataclasses.replace(CLOSE, tensors=ceiling, numbers=ceiling)
    return dataclasses.replace(wide, small=1.0, skips_alike=False)


def close(precision: str, noise: Mapping[str, float]) -> Tolerance:
    """Where both cut their batches alike; `noise` is how far that is from the whole batch.

    Where gradients cancel, sums in another order differ by more than usual. Cutting a batch shows
    how much, in the units of its precision; sums are made in those of fp32.
    """
    factor = NOISE_FACTOR * UNIT["fp32"] / UNIT[precision]
    allowed = {name: factor * size for name, size in noise.items()}
    return dataclasses.replace(CLOSE, noise=allowed)

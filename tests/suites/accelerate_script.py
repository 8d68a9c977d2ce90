"""One of Accelerate's own test scripts, as a rank of `allranks run`, on the CPU.

    allranks run --ranks 2 -- python tests/suites/accelerate_script.py test_sync
    allranks run --ranks 2 --shared-memory -- python tests/suites/accelerate_script.py test_sync

The scripts are those of `accelerate.test_utils.scripts`, unchanged. They expect to be started by
`accelerate launch`, most of them on GPUs, so this says in their place what that would say:

- `PartialState(cpu=True)`: without it Accelerate ignores the ranks on a machine without a GPU;
- the reference of `test_ddp_comm_hook` names a GPU in `device_ids`, which stays on the CPU;
- `--without` names functions that are left out, or of one (`test_ddp_comm_hook:BF16`) the calls
  with an argument of that name.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from torch_suite import without_devices


def without(function: Callable[..., None], argument: str) -> Callable[..., None]:
    """`function`, which does nothing: called with such an argument, or ever if it is empty."""

    def called(*args: Any) -> None:
        if argument and argument not in [getattr(arg, "name", None) for arg in args]:
            function(*args)

    return called


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script")
    parser.add_argument("--without", nargs="*", default=[], help="functions that are not called")
    asked = parser.parse_args()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    wrapper = torch.nn.parallel.DistributedDataParallel
    wrapper.__init__ = without_devices(wrapper.__init__)  # type: ignore[method-assign]
    print(PartialState(cpu=True))
    script = importlib.import_module(f"accelerate.test_utils.scripts.{asked.script}")
    for left_out in asked.without:
        name, _, argument = left_out.partition(":")
        setattr(script, name, without(getattr(script, name), argument))
    script.main()
    print("ended", asked.script)


if __name__ == "__main__":
    main()

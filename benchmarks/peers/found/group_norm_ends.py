"""torch 2.13.0: GroupNorm of a channels-last input that needs no gradient ends the process (CPU).

So does one whose weights alone are asked for, as a pipeline with split backward passes does. Prints
how a process of its own ends, for both layouts.
"""

import multiprocessing
import signal

import torch
from torch import nn


def backward(layout: torch.memory_format) -> None:
    """The gradients of the weights of a GroupNorm that images come to."""
    images = torch.randn(2, 8, 4, 4).contiguous(memory_format=layout)
    nn.GroupNorm(2, 8)(images).sum().backward()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for layout in (torch.contiguous_format, torch.channels_last):
        process = context.Process(target=backward, args=(layout,))
        process.start()
        process.join()
        code = process.exitcode
        print(f"{layout}: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}")

"""What a rank does in the tests of kernels: torch's switches are the process's own."""

from __future__ import annotations

from typing import Any

import torch

import trainer_tasks
from allranks.job.job import Job
from allranks.torch.trainer import Trainer


def newer_switch(argument: dict[str, str]) -> int:
    """A program sets one of torch's newer switches, trains, and finds it as it was."""
    backends: Any = torch.backends
    place = backends
    for part in filter(None, argument["place"].split(".")):
        place = getattr(place, part)
    place.fp32_precision = argument["value"]
    before = _switches()
    with Trainer(trainer_tasks.Worse(), Job()) as trainer:
        trainer.step(next(iter(trainer.batches())))
        assert {name for name, kind in _switches().items() if kind != "ieee"} <= {""}
    assert _switches() == before
    return 0


def _switches() -> dict[str, str]:
    backends: Any = torch.backends
    return {
        "matmul": backends.cuda.matmul.fp32_precision,
        "conv": backends.cudnn.conv.fp32_precision,
        "rnn": backends.cudnn.rnn.fp32_precision,
        "host matmul": backends.mkldnn.matmul.fp32_precision,
        "host conv": backends.mkldnn.conv.fp32_precision,
        "host rnn": backends.mkldnn.rnn.fp32_precision,
    }

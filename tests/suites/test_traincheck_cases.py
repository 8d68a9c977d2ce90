"""The silent faults that TrainCheck was evaluated on: what `check` and `same_on_ranks` say of them.

`docs/suites.md` has the table, with those that are seen by neither, and what TrainCheck's own tool
says where it was run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from allranks.testing import NotSame

SCRIPT = Path(__file__).with_name("traincheck_cases.py")
STEPS = 3
FOUND = {
    "none": "",
    "pytorch-104336": "replicas-drift",
    "x-jxmnop": "replicas-drift",
    "stackoverflow-67180955": "equal-random-streams",
    # nothing that has to do with ranks: out of reach
    "stackoverflow-60335387": "",
    "pytorch-forum-84911": "",
    "pytorch-51800": "",
    "mmpretrain-702": "",
    "transformers-33844": "",
}
"""By case: the finding of `allranks check -- python traincheck_cases.py CASE`, "" for none."""


@pytest.mark.slow
@pytest.mark.cases(
    "case", ["pytorch-104336"], exhaustive=[case for case in FOUND if case != "pytorch-104336"]
)
def test_check_says_of_a_case_what_the_page_says(case: str, tmp_path: Path) -> None:
    check = [sys.executable, "-m", "allranks.cli.main", "check", "--ranks", "2", "--"]
    command = [*check, sys.executable, str(SCRIPT), case]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == (5 if FOUND[case] else 0), ended.stdout + ended.stderr
    says = f"{FOUND[case]} (result)" if FOUND[case] else "nothing found on 2 ranks"
    assert says in ended.stdout


def trained(rank: int, world: int, *, wrong: str) -> Iterator[dict[str, Tensor]]:
    """Means of gradients by hand, a clip of the last layer, an update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points = torch.linspace(-1, 1, 48, dtype=torch.float64).view(12, 4).tensor_split(world)[rank]
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(points) - 3).square().mean().backward()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            dist.all_reduce(gradient)
            if (wrong, step, name, rank) == ("loses", 1, "0.bias", 1):
                gradient.zero_()  # the message is lost: PyTorch 84803 and 96600, Baichuan2 86
            gradient /= world
        if (wrong, rank) != ("clips alone", 1):  # a replicated layer: DeepSpeed 1801
            nn.utils.clip_grad_norm_(model[2].parameters(), 0.01)
        optimizer.step()
        yield {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "step", "tensor"), [("loses", 1, "0.bias"), ("clips alone", 0, "2.weight")]
)
def test_what_no_wrapper_does_is_found_beside_one_rank(
    wrong: str, step: int, tensor: str, same_on_ranks: Any
) -> None:
    same_on_ranks(partial(trained, wrong=""), ranks=(1, 2), steps=STEPS)
    with pytest.raises(NotSame) as found:
        same_on_ranks(partial(trained, wrong=wrong), ranks=(1, 2), steps=STEPS)
    assert (found.value.step, found.value.tensor) == (step, tensor)


def test_every_case_stands_in_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "suites.md").read_text()
    for case in [*FOUND.keys() - {"none"}, "deepspeed-1801", "pytorch-84803", "deepspeed-5794"]:
        said = f"`{FOUND[case]}`" if FOUND.get(case) else ""
        assert re.search(rf"^\| `{case}`.*{said}", page, re.M), case

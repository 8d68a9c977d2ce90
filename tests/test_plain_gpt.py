"""The GPT of docs/task_losses.md, with tied weights and padding, is its plain loop on any ranks.

The task is the one that the page shows, unchanged; the loop is what a person writes without us.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from allranks.job.program import find_program
from allranks.job.run_folder import read_rows
from allranks.torch import Task
from allranks.training.order import Order
from conftest import ROOT, Train
from test_docs import blocks_of

STEPS, SEED = 10, 0


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (shown,) = (
        b for b in blocks_of((ROOT / "docs/task_losses.md").read_text()) if b.file == "gpt_task.py"
    )
    path = tmp_path / shown.file
    path.write_text(shown.text)
    return path


def plain_loop(task: Any) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after STEPS steps in float64, and the loss of each: a mean over the tokens."""
    torch.manual_seed(SEED)
    model = task.model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    texts, order = task.train_data(), Order(60, task.batch_size, SEED, "keep")
    losses = []
    for step in range(STEPS):
        chosen = [texts[i] for i in order.batch(*divmod(step, order.steps_per_epoch))]
        length = max(map(len, chosen))
        batch = torch.stack([F.pad(text, (0, length - len(text))) for text in chosen])
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return model.state_dict(), losses


@pytest.mark.slow
def test_the_gpt_of_the_docs_is_its_plain_loop(program: Path, train: Train) -> None:
    task = find_program(str(program), Task)()
    weights, losses = plain_loop(task)
    for ranks in (1, 2, 3, 4):
        result = train(str(program), ranks=ranks, steps=STEPS, precision="fp64", micro_batch=2)
        found = load_file(result.run_dir / "weights.safetensors")
        assert {"tokens.weight", "block.linear1.weight"} <= found.keys() <= weights.keys()
        for name, tensor in found.items():
            apart = (tensor - weights[name]).norm() / weights[name].norm()
            assert tensor.dtype == torch.float64 and apart < 1e-12, (ranks, name, float(apart))
        rows = read_rows(result.run_dir / "metrics.jsonl")
        assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-12)

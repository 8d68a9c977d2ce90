"""On the TensorFlow engine, too, every rank has the same data: else nothing is trained."""

from __future__ import annotations

import pytest

from allranks.errors import RequestError
from conftest import TASKS, Train

pytestmark = pytest.mark.slow

TASK = f"{TASKS / 'tf_tasks.py'}:Differs"


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("shorter", "36 samples on rank 0, 35 on rank 1"),
        ("cut", r"other samples on rank 1 than on rank 0 \(36 on each\)"),
        ("by-number", r"other samples on rank 1 than on rank 0 \(72 on each\)"),
    ],
)
def test_ranks_with_other_data_are_refused(train_tf: Train, how: str, found: str) -> None:
    with pytest.raises(RequestError, match=found):
        train_tf(TASK, f"how={how}", ranks=2, steps=2, strategy="multi-worker-mirrored")

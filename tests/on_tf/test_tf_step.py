"""A step of the TensorFlow engine is that of a plain loop with the tape: weights, length,
clipping."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.process import Process
from allranks.launcher.supervisor import supervise

pytestmark = pytest.mark.slow


@pytest.mark.thinned(
    1, ("strategy", ["single", "mirrored:replicas=2"]), ("clip_norm", [None, 0.25, 1e6])
)
def test_token_weights_regularizer_and_clipping_are_plain_tensorflow(
    strategy: str, clip_norm: float | None, tf_server: ForkServer, tmp_path: Path
) -> None:
    argument = {"strategy": strategy, "clip_norm": clip_norm}
    log = tmp_path / "log"
    process = Process(0, "tf_step_workers:beside_a_tape", argument, {}, log)
    assert supervise(tf_server, [process]).exits[0].code == 0, log.read_text()


def test_gradients_lose_the_loss_scale_again(tf_server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Process(0, "tf_step_workers:scaled", {}, {}, log)
    assert supervise(tf_server, [process]).exits[0].code == 0, log.read_text()


def test_a_rehearsal_leaves_no_trace(tf_server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Process(0, "tf_step_workers:rehearses", {}, {}, log)
    assert supervise(tf_server, [process]).exits[0].code == 0, log.read_text()

"""A job whose strategy cuts the model compares its first steps with one process before it trains.

What differs ends with exit code 5, and nothing is left; what agrees is remembered.
"""

from __future__ import annotations

import py_compile
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import EXIT_DIFFERENCE_FOUND, NotEqual, RequestError
from allranks.job.config import resolve
from allranks.job.job import Job
from allranks.job.run_folder import read_rows
from allranks.launcher.describe import first_check
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import Result, run_job
from allranks.tools.check import first
from allranks.tools.check.against_single import CheckPlan


def test_a_first_check_has_the_schedule_of_the_training(tmp_path: Path) -> None:
    resolved = resolve("digits", {"ranks": 2, "strategy": "fsdp", "steps": 300})
    plan = CheckPlan((2,), 2, 8)
    check = first.FirstCheck(resolved, resolved.job, 2, tmp_path, None, plan)  # type: ignore[arg-type]
    assert (check.job.steps, check.job.schedule_steps) == (2, 300)


CODE = """
import os
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F
from allranks.torch import Task

class Middle(nn.Module):
    def forward(self, x):
        return DROP(x)

@dataclass(kw_only=True)
class Points(Task):
    batch_size: int = 22
    epochs: int = 1
    def model(self):
        return nn.Sequential(nn.Linear(6, 16), Middle(), nn.Linear(16, 3))
    def optimizer(self, model):
        WRITE(model)
        return torch.optim.SGD(model.parameters(), lr=0.1)
    def train_data(self):
        return torch.randn(44, 6, generator=torch.Generator().manual_seed(1))
    def loss(self, output, batch):
        return LOSS(output)
    def eval_data(self):
        return self.train_data()
    def metrics(self, output, batch):
        return {"first": (output[:, 0].sum(), len(output))}
"""
PARTS = {
    "DROP(x)": "torch.tanh(x)",
    "WRITE(model)": "pass",
    "LOSS(output)": "output.square().sum(1)",
}
COUPLED = {"LOSS(output)": "(output - output.mean(0)).square().sum(1)"}
DRAWS = {"DROP(x)": "F.dropout(torch.tanh(x), 0.5, self.training)"}

Start = Callable[..., Result]


@pytest.fixture
def start(server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start(parts, **flags)` trains such a program as the command line does; two ranks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = iter(range(100))

    def run(parts: dict[str, str], told: list[str] | None = None, **flags: Any) -> Result:
        code = CODE
        for placeholder, text in {**PARTS, **parts}.items():
            code = code.replace(placeholder, text)
        program = tmp_path / "points.py"
        program.write_text(code)
        flags = {"ranks": 2, "run_dir": str(tmp_path / f"run-{next(runs)}"), **flags}

        def check(*arguments: Any) -> Any:
            return first_check(*arguments, announce=(told if told is not None else []).append)

        return run_job(resolve(str(program), flags, ()), server, first_check=check)

    return run


@pytest.mark.slow
def test_samples_that_see_each_other_end_the_job_before_it_trains(
    start: Start, tmp_path: Path
) -> None:
    with pytest.raises(NotEqual, match=r"(?s)loss differs at step 0.*--first-check off") as error:
        start(COUPLED, strategy="zero1")
    assert error.value.exit_code == EXIT_DIFFERENCE_FOUND
    assert not (tmp_path / "run-0").exists()
    assert not (tmp_path / "cache").exists(), "what differs is not remembered as equal"


@pytest.mark.slow
def test_what_the_witness_names_is_looked_at_for_more_steps(start: Start) -> None:
    counts = "vars(self).update(n=getattr(self, 'n', 0) + 1)"
    later = {"DROP(x)": f"{counts} or x - (self.n > 4) * x.mean(0)"}
    with pytest.raises(NotEqual, match="loss differs at step 4"):
        start(later, strategy="zero1", steps=20)


@pytest.mark.slow
def test_a_copy_of_weights_that_one_rank_has_changed_ends_the_job(start: Start) -> None:
    """Rows that another rank updates: after the first step all have them from there."""
    write = "model[0].weight.data[:8].mul_(1 - int(os.environ.get('RANK', 0)))"
    with pytest.raises(NotEqual, match="rank 1 does not hold what rank 0 holds"):
        start({"WRITE(model)": write}, strategy="zero1")


def test_a_job_says_that_it_is_proved_and_the_next_one_needs_no_check(
    start: Start, tmp_path: Path
) -> None:
    told: list[str] = []
    summary = start({}, told, strategy="zero1").summary
    assert summary["proof"]["proved"], summary["proof"]
    assert [text.split(":")[0] for text in told] == ["first check"]
    assert '\nproof = "proved: 2 steps on 2 ranks' in (tmp_path / "run-0/job.toml").read_text()
    events = read_rows(tmp_path / "run-0/events.jsonl")
    assert [row["proved"] for row in events if row["event"] == "proof"] == [True]

    again = start({}, told, strategy="zero1").summary
    assert again["weights_sha256"] == summary["weights_sha256"]
    assert "checked on" in again["proof"]["why"] and len(told) == 1
    start({"WRITE(model)": "pass  # edited"}, told, strategy="zero1")
    start({}, told, strategy="zero2")
    assert len(told) == 3, "another file and another strategy have passed nothing"
    start({}, told, strategy="zero1", first_check="1")
    start({}, told, strategy="zero1", first_check="3")
    assert len(told) == 4, "two steps are enough for one, and not for three"


@pytest.mark.slow
def test_a_job_that_its_ranks_refuse_is_not_announced(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is no chain, and its task says no stages."""
    monkeypatch.setattr(first, "SILENT_S", 1e6)
    told: list[str] = []
    with pytest.raises(RequestError, match=r"write stages\(self, model, count\) in the task"):
        start(
            {
                "nn.Sequential(nn": "type('Net', (nn.Sequential,), {'forward': lambda s, x: "
                "nn.Sequential.forward(s, x)})(nn"
            },
            told,
            strategy="gpipe",
        )
    assert told == []


READS = {
    "LOSS(output)": "output.square().sum(1) * by_file() * float(os.environ.get('SCALE', 1))",
    "DROP(x)": "__import__('late_module').f(x)",
    "import os\n": """import os

def by_file():
    try:
        with open(os.path.join(os.path.dirname(__file__), "factor.txt")) as file:
            return float(file.read())
    except OSError:
        return 1.0

""",
}


@pytest.mark.slow
def test_what_has_passed_counts_while_all_that_it_read_is_as_it_was(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "late_module.py"
    late.write_text("import torch\nf = torch.tanh\n")
    py_compile.compile(str(late))
    told: list[str] = []

    def is_checked(**flags: Any) -> bool:
        before = len(told)
        assert start(READS, told, **{"strategy": "zero1", **flags}).summary["proof"]["proved"]
        return len(told) > before

    assert is_checked() and not is_checked()
    assert is_checked(ranks=3), "two ranks say nothing of three"
    assert is_checked(micro_batch=4), "nor passes of all samples of those of four"
    assert not is_checked(seed=1, steps=1, eval_every="1", prefetch=1)
    monkeypatch.setenv("SCALE", "2")
    assert is_checked() and not is_checked()
    monkeypatch.setenv("SCALE_OF_OTHERS", "2")
    assert not is_checked(), "the program does not name that variable"
    (tmp_path / "factor.txt").write_text("0.5")
    assert is_checked() and not is_checked(), "a file that was not there"
    (tmp_path / "factor.txt").write_text("0.25")
    assert is_checked() and not is_checked()
    late.write_text("import torch\nf = torch.sin\n")
    assert is_checked() and not is_checked(), "a module that forward imports"
    kept = b"".join(path.read_bytes() for path in (tmp_path / "cache").rglob("*.json"))
    assert b"SCALE" not in kept, "no variable is written down"


def test_strategies_that_hold_the_model_whole_need_no_proof(start: Start) -> None:
    told: list[str] = []
    assert start(COUPLED, told, strategy="ddp").summary["proof"] is None
    assert told == []


def test_a_job_that_leaves_the_check_out_says_that_it_is_not_proved(start: Start) -> None:
    proof = start(COUPLED, strategy="zero1", first_check="off").summary["proof"]
    assert proof == {"proved": False, "why": "--first-check off left it out"}


@pytest.mark.slow
def test_a_check_out_of_time_or_memory_lets_the_job_train(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as full:
        full.setattr(first, "COPIES_IN_MEMORY", 1 << 40)
        proof = start({}, strategy="zero1").summary["proof"]
        assert not proof["proved"] and "one process would need" in proof["why"]
    told: list[str] = []
    with monkeypatch.context() as late:
        late.setattr(first, "BUDGET_S", 0.0)
        proof = start({}, told, strategy="zero1").summary["proof"]
        assert not proof["proved"] and "took more than" in proof["why"]
    again = start({}, told, strategy="zero1").summary["proof"]
    assert not again["proved"] and "--first-check 2 checks again" in again["why"]
    assert len(told) == 1, "the next start does not spend the time again"
    assert start({}, told, strategy="zero1", first_check="2").summary["proof"]["proved"]
    assert start({}, told, strategy="zero1").summary["proof"]["proved"]
    assert len(told) == 2


@pytest.mark.slow
def test_a_check_out_of_time_counts_while_what_it_has_read_is_as_it_was(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = first.FirstCheck.run

    def is_late(check: first.FirstCheck, name: str, job: Job) -> Any:
        made = run(check, name, job)
        if job.ranks > 1:  # as if it were cut short: what it has told stands in its folder alone
            check.read.clear()
            raise first._OutOfTime
        return made

    monkeypatch.setattr(first.FirstCheck, "run", is_late)
    told: list[str] = []
    at_once = {"WRITE(model)": "open(os.path.join(os.path.dirname(__file__), 'rate.txt')).close()"}
    (tmp_path / "rate.txt").write_text("1")
    for _ in range(2):
        proof = start(at_once, told, strategy="zero1").summary["proof"]
        assert not proof["proved"] and len(told) == 1
    (tmp_path / "rate.txt").write_text("10")
    start(at_once, told, strategy="zero1")
    assert len(told) == 2, "it has read another file"


@pytest.mark.slow
def test_numbers_that_follow_the_micro_batch_are_no_difference(start: Start) -> None:
    """Under a pipeline what functions draw follows the micro-batch; with equal bits it does not."""
    proof = start(DRAWS, strategy="gpipe").summary["proof"]
    assert proof["proved"] and "bit by bit" in proof["why"]


@pytest.mark.slow
def test_equal_bits_are_compared_as_bits(start: Start) -> None:
    proof = start({}, strategy="zero1", bitwise=True).summary["proof"]
    assert proof["proved"] and proof["why"].endswith("bit by bit")


@pytest.mark.slow
def test_what_only_16_bits_compute_is_compared_too(start: Start, tmp_path: Path) -> None:
    """In float64 the branch is not taken: the job's own passes are made once more in bf16."""
    low = "torch.is_autocast_enabled('cpu') * int(os.environ.get('RANK', 0))"
    fault = {"DROP(x)": f"torch.tanh(x) * (1 + {low})"}
    with pytest.raises(NotEqual, match=r"on 2 ranks, bf16\n"):
        start(fault, strategy="zero1", precision="bf16")
    proof = start({}, strategy="zero1", precision="bf16").summary["proof"]
    assert proof["proved"] and proof["why"].endswith("with one process in fp64 and in bf16")


@pytest.mark.slow
@pytest.mark.cases(("strategy", "precision"), [("fsdp", "fp16")], exhaustive=[("gpipe", "bf16")])
def test_16_bits_raise_no_false_alarm(
    server: ForkServer, tmp_path: Path, monkeypatch: Any, strategy: str, precision: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = {"ranks": 2, "steps": 2, "strategy": strategy, "precision": precision}
    flags["run_dir"] = str(tmp_path / "run")
    proof = run_job(resolve("digits", flags, ()), server, first_check=first_check).summary["proof"]
    assert proof["proved"], proof["why"]


@pytest.mark.slow
def test_a_strategy_that_promises_nothing_of_the_kind_is_not_proved(start: Start) -> None:
    proof = start({}, strategy="independent").summary["proof"]
    assert not proof["proved"] and "does not promise" in proof["why"]
    proof = start({}, strategy="local-sgd:every=2").summary["proof"]
    assert proof["proved"] and "local-sgd:every=1" in proof["why"]


@pytest.mark.slow
def test_the_command_ends_with_exit_code_5(tmp_path: Path) -> None:
    code = CODE
    for placeholder, text in {**PARTS, **COUPLED}.items():
        code = code.replace(placeholder, text)
    (tmp_path / "points.py").write_text(code)
    words = ["train", "points.py", "--ranks", "2", "--strategy", "fsdp", "--run-dir", "run"]
    command = [sys.executable, "-m", "allranks.cli.main", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_DIFFERENCE_FOUND, done.stderr
    assert "loss differs at step 0" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()

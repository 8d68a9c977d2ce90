"""`allranks check --against`: two scripts are equal, or their first difference has its cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.cli.check import check_script
from allranks.errors import RequestError
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.scripts.plan import CommandRequest
from allranks.launcher.scripts.run import run_command
from allranks.tools.script_check.rules.against import (
    LIMITS,
    NAMES_OF_WRAPPERS,
    OPERATORS,
    RecordedScript,
    StepComparison,
    compare_operators,
)
from allranks.tools.script_check.rules.facts import FACTS, watched_request

SCRIPTS = Path(__file__).parent / "against"
COMMAND = (sys.executable, "-m", "allranks.cli.main", "check")
Recorded = Callable[[str, int], RecordedScript]

EQUAL = {
    "ddp": ("plain.py 32", 1, "plain.py 16", 2),
    "fsdp2": ("plain.py 32 adam", 1, "plain.py 16 adam sharded", 2),
    "accumulation": ("plain.py 32", 1, "plain.py 8 accumulated", 1),
    "lightning": ("by_lightning.py 32", 1, "by_lightning.py 16", 2),
    "accelerate": ("by_accelerate.py 32", 1, "by_accelerate.py 16", 2),
    "rounding-of-a-bias": (
        "plain.py 32 adam normalised",
        1,
        "plain.py 32 adam normalised reversed",
        1,
    ),
    "rounding-of-two": (
        "plain.py 32 adam normalised critic",
        1,
        "plain.py 32 adam normalised critic reversed",
        1,
    ),
    "many": ("plain.py 32 many", 1, "plain.py 16 many", 2),
    "complex": ("plain.py 32 complex", 1, "plain.py 16 complex", 2),
    "tuning": ("plain.py 32 tuning", 1, "plain.py 16 tuning", 2),
    "rounding-of-a-part": ("plain.py 32 adam centred", 1, "plain.py 32 adam centred reversed", 1),
    "rounding-of-keys": ("plain.py 32 adam attention", 1, "plain.py 16 adam attention", 2),
}
UNEQUAL = {
    "samples": (
        ("plain.py 32", 1, "plain.py 16 same-samples", 2),
        (1, "samples", "float32 (8,)", "all 2 ranks read the same samples"),
    ),
    "accumulation": (
        ("plain.py 32", 1, "plain.py 8 accumulated undivided", 1),
        (1, "loss", "loss", "it is 4 times too large; accumulation-not-divided at "),
    ),
    "reduction": (
        ("plain.py 32", 1, "plain.py 16 not-reduced", 2),
        (1, "gradient", "0.weight", "each rank has its own: as a mean, which is missing"),
    ),
    "rate": (
        ("plain.py 32", 1, "plain.py 16 rate", 2),
        (4, "rate", "lr of group 0", "it is 2, the number of ranks, times too large"),
    ),
    "shards": (
        ("plain.py 32 adam", 1, "plain.py 16 adam sharded multiplied", 2),
        (1, "gradient", "0.weight", "it is 2, the number of ranks, times too large"),
    ),
    "doubled": (
        ("plain.py 16", 1, "plain.py 16", 2),
        (1, "samples", "float32 (8,)", "all ranks together read those of 2 steps of --against"),
    ),
    "padded": (
        ("plain.py 32", 1, "plain.py 32 padded", 1),
        (5, "samples", "float32 (8,)", "1 of them come twice, as a DistributedSampler repeats"),
    ),
    "uncleared": (
        ("plain.py 32", 1, "plain.py 16 uncleared", 2),
        (2, "gradient", "0.weight", "it is added to that of the step before: no zero_grad"),
    ),
    "twins": (
        ("plain.py 32 twins", 1, "plain.py 16 twins", 2),  # one of them is not in DDP
        (1, "gradient", "0.weight", "each rank has its own: as a mean, which is missing"),
    ),
    "uncleared-critic": (
        ("plain.py 32 critic", 1, "plain.py 16 critic uncleared", 2),
        (4, "gradient", "0.weight", "it is added to that of the step before: no zero_grad"),
    ),
    "restored": (
        ("plain.py 32 tuning", 1, "plain.py 32 tuning restored", 1),
        (2, "update", "0.weight", ""),
    ),
    "start": (
        ("plain.py 32", 1, "plain.py 16 by-hand", 2),
        (1, "weight before training", "0.weight", "nothing was trained yet: "),
    ),
    "optimizer": (
        ("plain.py 32 adam", 1, "plain.py 32 adamw", 1),
        (1, "rate", "decoupled_weight_decay of group 0", ""),
    ),
    "weight": (
        ("plain.py 32 adam", 1, "plain.py 32 adam shrinking", 1),
        (3, "weight", "4.bias", ""),
    ),
    "dropout": (
        ("plain.py 32 dropout", 1, "plain.py 16 dropout", 2),
        (1, "loss", "loss", "unknown; the forward draws random numbers"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("against")


@pytest.fixture
def recorded(server: ForkServer, folder: Path) -> Recorded:
    """Records the steps of a script; a command that several pairs have runs once."""

    def record(words: str, ranks: int) -> RecordedScript:
        run_dir = folder / f"{words.replace(' ', '_')}-{ranks}"
        if not run_dir.exists():
            script, *more = words.split()
            command = (sys.executable, "-u", str(SCRIPTS / script), *more)
            request = CommandRequest(command, ranks, warm="torch", shown="none")
            run_command(watched_request(request, str(run_dir), os.environ, 20), server)
        return RecordedScript(run_dir / FACTS, words)

    return record


@pytest.mark.slow(most=7)
@pytest.mark.parametrize("name", EQUAL)
def test_equal_scripts_are_equal(name: str, recorded: Recorded) -> None:
    reference, ranks, candidate, others = EQUAL[name]
    comparison = StepComparison(recorded(reference, ranks), recorded(candidate, others))
    assert comparison.equal, str(comparison)
    assert comparison.compared == 6 * (1 + ("critic" in candidate))
    if name == "many":
        assert "samples float32 (8,) not compared: too many" in str(comparison)
    if "rounding" in name:
        assert any(note.startswith("weights not compared") for note in comparison.notes.values())


@pytest.mark.slow(most=9)
@pytest.mark.parametrize("name", UNEQUAL)
def test_the_first_difference_is_named_with_its_cause(name: str, recorded: Recorded) -> None:
    (reference, ranks, candidate, others), (step, kind, tensor, cause) = UNEQUAL[name]
    comparison = StepComparison(recorded(reference, ranks), recorded(candidate, others))
    first = comparison.difference
    assert comparison.equal is False and first is not None
    assert (first.step, first.kind, first.tensor) == (step, kind, tensor), str(comparison)
    assert first.cause.startswith(cause) and bool(first.cause) == bool(cause), str(comparison)
    assert first.where is not None and first.where[0] == str(SCRIPTS / candidate.split()[0])


KERNELS = "plain.py 16 kernels"
LIES = {
    "plain.py 16": ("", "", ""),
    KERNELS: ("", "", ""),
    f"{KERNELS} interleaved": ("", "", ""),
    f"{KERNELS} lie=element": ("Gate.forward", "1", "forward"),
    f"{KERNELS} lie=forward-scale": ("Gate.forward", "1", "forward"),
    f"{KERNELS} lie=divisor": ("MeanError.forward", "main()", "forward"),
    f"{KERNELS} lie=backward-scale": ("Gate.backward", "1", "backward"),
    f"{KERNELS} lie=rows": ("Sum.backward", "1", "backward"),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", LIES)
def test_the_operator_that_lies_is_named(words: str, server: ForkServer, folder: Path) -> None:
    """On two ranks against one; of honest kernels none is."""
    reference = "plain.py 32 kernels" if "kernels" in words else "plain.py 32"
    sides = []
    for command, ranks in ((words, 2), (reference, 1)):
        run_dir = folder / f"{command.replace(' ', '_')}-{ranks}-operators"
        if not run_dir.exists():
            script, *more = command.split()
            line = (sys.executable, "-u", str(SCRIPTS / script), *more, "half")
            request = CommandRequest(line, ranks, warm="torch", shown="none")
            run_command(watched_request(request, str(run_dir), os.environ, at=1), server)
        sides.append(run_dir / FACTS / OPERATORS)
    found = compare_operators(*sides, LIMITS["float32"], NAMES_OF_WRAPPERS)
    assert (found.name, found.module, found.phase) == LIES[words], str(found)
    assert found.total - 9 <= found.compared >= 20, str(found)
    assert found.line.startswith("plain.py:") == bool(found.name)


@pytest.mark.slow
def test_scripts_of_other_numbers_of_steps_are_told_both(recorded: Recorded) -> None:
    comparison = StepComparison(recorded("plain.py 32", 1), recorded("plain.py 32 half", 1))
    assert comparison.difference is None and comparison.equal is False
    assert "do not correspond: 3 steps, and 6 with --against" in str(comparison)


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--warm", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_verb_runs_both_and_says_which_prints(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    done = check(
        tmp_path, "--ranks", "1", "--json", "--against", "train.py 1", "--", "train.py", "2"
    )
    assert done.returncode == 5, done.stderr
    lines = done.stdout.splitlines()
    assert {"[against rank 0] trains 1", "[checked rank 0] trains 2"} <= set(lines)
    told = json.loads(lines[-1])
    assert told["difference"]["kind"] == "rate" and told["steps"] == [3, 3]
    assert "cause:   it is 2 times too large" in done.stderr


TRAINS = """
import sys, torch
print("trains", sys.argv[1], flush=True)
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * float(sys.argv[1]))
for _ in range(3):
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()
"""
BAD = """
import sys, time, torch
if sys.argv[1] == "waits":
    time.sleep(60)
elif sys.argv[1] == "fails":
    raise ValueError("of the script")
"""


@pytest.mark.slow
def test_scripts_that_cannot_be_compared_are_refused(recorded: Recorded) -> None:
    with pytest.raises(RequestError, match="no optimizer of torch made a step in any process"):
        recorded("plain.py 32 no-step", 1)
    with pytest.raises(RequestError, match=r"6 with --against .* and 2 without"):
        StepComparison(recorded("plain.py 32", 1), recorded("plain.py 32 short", 1))


@pytest.mark.slow
def test_a_command_without_a_step_is_a_bad_request(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    done = check(tmp_path, "--ranks", "1", "--against", "bad.py none", "--", "bad.py", "none")
    assert done.returncode == 2, done.stderr
    assert all(part in done.stderr for part in ("asked:", "found:", "why:", "do:")), done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--against", "bad.py 'open", "--", "bad.py"), "No closing quotation"),
        (("--against", "", "--", "bad.py"), "--against ''"),
        (("--steps", "3", "--", "bad.py"), "no --against"),
        (("--against-ranks", "2", "--", "bad.py"), "no --against"),
        (("--deep", "--", "bad.py"), "no --against"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_start(
    words: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=text):
        check_script.main([*words], standalone_mode=False)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sides", [("waits", "fails"), ("fails", "waits")])
def test_a_script_that_fails_stops_the_other(sides: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    done = check(
        tmp_path, "--ranks", "1", "--against", f"bad.py {sides[0]}", "--", "bad.py", sides[1]
    )
    assert done.returncode == 1
    assert "failed first" in done.stderr and "ValueError: of the script" in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_both(tmp_path: Path) -> None:
    """What is left behind would fail this test."""
    (tmp_path / "bad.py").write_text(BAD)
    words = [
        *COMMAND,
        "--warm",
        "--ranks",
        "1",
        "--against",
        "bad.py waits",
        "--",
        "bad.py",
        "waits",
    ]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for _ in range(2):  # both have started
            assert "1 rank: " in running.stderr.readline()
        running.send_signal(signal.SIGINT)
        rest = running.stderr.read()
    assert running.returncode == 130 and "interrupted (SIGINT)" in rest

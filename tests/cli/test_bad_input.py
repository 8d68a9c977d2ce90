"""Bad requests: refused with four parts and exit code 2, and no run folder is left."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.main import main
from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.run_folder import RunFolder, is_in_use
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import Result, run_job

FOUR_PARTS = re.compile(
    r"\Aallranks: this cannot be done\nasked: \S.*\nfound: \S.*\nwhy:   \S.*\ndo:    \S.*\n\Z"
)
Refuse = Callable[..., RequestError]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def below(folder: Path) -> set[Path]:
    """All that is there; not what Python compiles of a program beside it."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture
def refuse(server: ForkServer, folder: Path) -> Refuse:
    """`refuse(program, *settings, **flags)`: the refusal of a job, with its run folder gone."""

    def run(program: str, *settings: str, **flags: Any) -> RequestError:
        before = below(folder)
        with pytest.raises(RequestError) as refused:
            run_job(resolve(program, flags, settings), server)
        assert all(refused.value.to_data().values())
        assert refused.value.exit_code == 2
        assert below(folder) == before, "no run folder, no file"
        return refused.value

    return run


def door(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str]:
    """The exit code and standard error of `allranks WORDS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["allranks", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    return left.value.code, capfd.readouterr().err


# --- found on the command line, before anything is started ------------------------------------


@pytest.mark.parametrize(
    ("words", "do"),
    [
        ([], "name a task: allranks train digits"),
        (["digits", "--ranks", "0"], "give --ranks a number that is at least 1"),
        (["digits", "--strategy", "ddpp"], "did you mean 'ddp'?"),
        (["digits", "--strategy", "ddp:bucketmb=1"], "did you mean 'bucket_mb'?"),
        (["digits", "--strategy", "ddp:bucket_mb=big"], "for example bucket_mb=25.0"),
        (["digits", "--strategy", "ddp:reduce=treee"], "did you mean 'tree'?"),
        (["digits", "--strategy", "ddp:"], "write it like ddp, ddp:bucket_mb=1"),
        (["digits", "--ranks", "2", "--strategy", "single"], "--ranks 1, or --strategy ddp"),
        (["digits", "--precision", "fp8"], "did you mean 'fp"),
        (["digits", "--device", "cude"], "did you mean 'cuda'?"),
        (
            ["digits-keras", "--engine", "tensorflow", "--device", "xpu"],
            "did you mean 'cpu'? known: cpu, cuda",
        ),
        (["digits", "--first-check", "0"], "auto, off, or a number of steps from 1 on"),
        (["digits", "--precision", "tf32"], "--precision fp32 or bf16, or --device cuda"),
        (["digits", "--loss-scale", "8"], "--precision fp16, or leave --loss-scale out"),
        (["digits", "--precision", "fp16", "--loss-scale", "big"], "--loss-scale dynamic, "),
        (["digits", "--bitwise", "--compile", "eager"], "drop --compile, or drop --bitwise"),
        (["digits", "--compile", "eager", "--activation-checkpointing"], "drop one of them; "),
        (["digits", "--devices", "0,1"], "--device cuda --devices 0,1"),
        (["digits", "--device", "cuda", "--devices", "0,0"], "for example --devices 0,1,4,5"),
        (["digits", "--eval-every", "0"], "--eval-every 100, or --eval-every epoch"),
        (["digits", "--early-stop", "max:accuracy"], "--early-stop max:accuracy --eval-every"),
        (["digits", "--early-stop", "accuracy"], "for example --early-stop max:accuracy"),
        (["digits", "--patience", "0"], "give --patience a number that is at least 1"),
        (["digits", "--log", "csb"], "did you mean 'csv'?"),
        (["digits", "--set", "lr"], "--set lr=VALUE"),
        (["--job", "nowhere.toml"], "check the path and the line"),
        (["--job", "broken.toml"], "check the path and the line"),
        (["--job", "misspelt.toml"], "did you mean 'ranks'?"),
    ],
    ids=" ".join,
)
def test_the_command_line_refuses(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    do: str,
) -> None:
    (folder / "broken.toml").write_text('program = "digits"\nranks = \n')
    (folder / "misspelt.toml").write_text('program = "digits"\nrnaks = 2\n')
    code, text = door(monkeypatch, capfd, "train", *words)
    assert code == 2
    assert FOUR_PARTS.match(text), text
    assert f"\ndo:    {do}" in text
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("words", ["show", "report", "checkpoints list", "train digits --job"])
def test_a_name_that_no_file_system_takes_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: str
) -> None:
    code, text = door(monkeypatch, capfd, *words.split(), "a" * 300)
    assert code == 2
    assert FOUR_PARTS.match(text), text


@pytest.mark.parametrize(
    ("flag", "value", "do"),
    [
        ("--checkpoint-every", "0", "give --checkpoint-every a number that is at least 1"),
        ("--checkpoint-every", "-5", "give --checkpoint-every a number that is at least 1"),
        ("--keep", "0", "give --keep a number that is at least 1"),
        ("--best", "accuracy", "for example --best max:accuracy"),
        ("--best", "max:", "for example --best max:accuracy"),
        ("--best", "most:accuracy", "for example --best max:accuracy"),
        ("--best", "max:two words", "for example --best max:accuracy"),
        ("--resume", "nowhere", "name a run folder (see `allranks runs`)"),
        ("--resume", "misspelt.toml", "name a run folder (see `allranks runs`)"),
        ("--resume", ".", "name a run folder (see `allranks runs`)"),
        ("--resume", "", "name a run folder (see `allranks runs`)"),
        ("--resume", "x" * 5000, "name a run folder (see `allranks runs`)"),
        ("--max-restarts", "-1", "give --max-restarts a number that is at least 0"),
        ("--hang-timeout", "-1", "give --hang-timeout a number that is at least 0"),
        ("--hang-timeout", "nan", "give --hang-timeout a number that is at least 0"),
        ("--time-limit", "0", "give --time-limit a number that is over 0"),
        ("--on-bad-step", "ignore", "known: skip, stop, warn"),
        ("--on-bad-step", "skp", "did you mean 'skip'?"),
        ("--spike", "1", "give --spike a number that is over 1"),
        ("--spike", "nan", "give --spike a number that is over 1"),
        ("--spike", "-3", "give --spike a number that is over 1"),
        ("--verify-every", "0", "give --verify-every a number that is at least 1"),
        ("--inject", "kil@step=1", "did you mean 'kill'?"),
        ("--inject", "kill@stop=1", "did you mean 'step'?"),
        ("--inject", "kill@at=savee:write", "did you mean 'save:write'?"),
        ("--inject", "kill@step=soon", "give step a value of that type"),
        ("--inject", "@", "known: abort, "),
    ],
)
def test_a_bad_value_of_what_protects_a_job(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    flag: str,
    value: str,
    do: str,
) -> None:
    (folder / "misspelt.toml").write_text("no checkpoint")
    before = below(folder)
    code, text = door(monkeypatch, capfd, "train", "digits", flag, value)
    assert code == 2
    assert FOUR_PARTS.match(text), text
    assert f"\ndo:    {do}" in text
    assert below(folder) == before


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--checkpoint-every", "often"),
        ("--checkpoint-every", "1.5"),
        ("--keep", "all"),
        ("--max-restarts", "many"),
        ("--hang-timeout", "soon"),
        ("--time-limit", "1h30"),
        ("--time-limit", "1:\u00b2"),
        ("--time-limit", ""),
        ("--time-limit", "-5"),
        ("--time-limit", "inf"),
        ("--spike", "x"),
        ("--verify-every", "2e1"),
    ],
)
def test_a_value_of_another_kind(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    """The parser of the command line refuses it, by the name of the flag."""
    code, text = door(monkeypatch, capfd, "train", "digits", flag, value)
    assert code == 2
    assert f"Invalid value for '{flag}'" in text and repr(value) in text
    assert "Traceback" not in text


@pytest.mark.parametrize("words", [["--steps", "5", "--epochs", "2"]])
def test_two_ends_of_one_training(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    code, text = door(monkeypatch, capfd, "train", "digits", *words)
    assert code == 2 and "say two things about one end" in text


# --- found when the program is loaded ---------------------------------------------------------


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("program", "settings", "flags", "found"),
    [
        ("digts", (), {}, "neither a built-in program nor a .py file nor module:Class"),
        ("nowhere.py", (), {}, "no file nowhere.py in "),
        ("syntax.py", (), {}, "SyntaxError: "),
        ("leaves.py", (), {}, "SystemExit: 0"),
        ("bad_tasks:Godo", (), {}, "no such name there"),
        ("bad_tasks:nn", (), {}, "that name is no task there"),
        ("bad_tasks:NoLoss", (), {}, "NoLoss has no loss"),
        ("bad_tasks:FailsWhenMade", (), {}, "ValueError: lr and order do not go together"),
        ("bad_tasks:Good", ("ordre=up",), {}, "no field 'ordre' in Good"),
        ("bad_tasks:Good", ("lr=fast",), {}, "'fast'"),
        ("bad_tasks:Good", ("order=sideways",), {}, "'sideways'"),
        ("bad_tasks:Good", ("batch_size=2.5",), {}, "'2.5'"),
        ("bad_tasks:Good", ("batch_size=0",), {}, "0"),
        ("bad_tasks:Good", (), {"ranks": 9}, "the task cuts its batch into shards = 8"),
        ("bad_tasks:Good", ("shards=2",), {"ranks": 3}, "the task cuts its batch into shards = 2"),
    ],
)
def test_loading_the_program_refuses(
    folder: Path,
    refuse: Refuse,
    program: str,
    settings: tuple[str, ...],
    flags: dict[str, Any],
    found: str,
) -> None:
    (folder / "syntax.py").write_text("def broken(:\n    pass\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    refusal = refuse(program, *settings, **flags)
    assert refusal.found.startswith(found)
    assert "Traceback" not in str(refusal)


@pytest.mark.parametrize("makes", ["", "class Net(torch.nn.Module):\n    pass\n\n"])
def test_a_script_is_not_run_to_find_that_it_has_no_task(
    folder: Path, refuse: Refuse, makes: str
) -> None:
    script = f"import torch\n\n{makes}for step in range(3):\n    open('ran', 'w').close()\n"
    (folder / "train.py").write_text(script)
    assert "allranks check --ranks 2 -- python train.py" in refuse("train.py").do
    assert not (folder / "ran").exists()


def test_what_a_refusal_names(folder: Path, refuse: Refuse) -> None:
    (folder / "syntax.py").write_text("def broken(:\n    pass\n")
    assert refuse("syntax.py").found.endswith(f"at line 1 of {folder / 'syntax.py'}")
    assert refuse("bad_tasks:Good", "ordre=up").do.startswith("did you mean 'order'?")
    assert refuse("bad_tasks:Good", ranks=9).do.startswith("--ranks 8, or --set shards=9")


def test_a_device_that_is_not_there_is_refused(refuse: Refuse) -> None:
    refusal = refuse("bad_tasks:Good", "shards=64", ranks=64, device="cuda")
    assert re.match(r"\d+ CUDA devices", refusal.found)
    assert refusal.do.startswith("--device ")


# --- found by the ranks, before the first update ------------------------------------------------


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("program", "flags", "asked", "found"),
    [
        ("ScalarLoss", {}, "loss(output, batch) of the task", "a scalar for 2 samples"),
        ("ScalarLoss", {"ranks": 2}, "loss(output, batch) of the task", "a scalar for 2 samples"),
        ("NumberLoss", {}, "loss(output, batch) of the task", "a float for 2 samples"),
        (
            "TransposedLoss",
            {},
            "loss(output, batch) of the task",
            "a tensor of shape (3, 2) for 2 samples",
        ),
        (
            "WrongWeight",
            {},
            "weight(batch) of the task",
            "shape (2, 1), with losses of shape (2,)",
        ),
        (
            "NoWeight",
            {"ranks": 2},
            "step 0 of the job",
            "the weights of its global batch add up to 0.0",
        ),
        ("NumberWeight", {}, "weight(batch) of the task", "no tensor, with losses of shape (2,)"),
        ("NoPair", {}, "metrics(output, batch) of the task", "accuracy = 0.5"),
        ("NoModule", {}, "model() of the task", "a function"),
        (
            "OtherOptimizer",
            {},
            "optimizer(model) of the task",
            "1 parameters that are not in the model",
        ),
        ("NoOptimizer", {}, "optimizer(model) of the task", "a NoneType"),
        ("NoData", {}, "train_data() of the task", "0 samples"),
        ("UnevenData", {}, "train_data() of the task", "lengths [4, 5]"),
        ("StrangeData", {}, "train_data() of the task", "int"),
        (
            "Normed",
            {"micro_batch": 1},
            "--micro-batch 1",
            "shards of 2 samples, in a model with BatchNorm",
        ),
        (
            "Synchronised",
            {},
            "to train a model with SyncBatchNorm at '1'",
            "SyncBatchNorm",
        ),
    ],
)
def test_the_ranks_refuse(
    refuse: Refuse, program: str, flags: dict[str, Any], asked: str, found: str
) -> None:
    refusal = refuse(f"bad_tasks:{program}", **flags)
    assert (refusal.asked, refusal.found) == (asked, found)


def test_every_batch_dropped_is_refused(refuse: Refuse) -> None:
    settings = ("batch_size=64", "last_batch=drop")
    assert refuse("bad_tasks:Good", *settings).found == "40 samples, batch_size = 64"


# --- what is asked is what is run, and what is recorded -----------------------------------------


def test_a_field_set_to_none_is_none_when_the_job_is_run_again(
    folder: Path, train: Callable[..., Result]
) -> None:
    """`clip_norm` is 1.0 unless it is set: a job file that leaves none out would clip again."""
    train("bad_tasks:Good", "clip_norm=none", run_dir="first", steps=3)
    job = tomllib.loads((folder / "first" / "job.toml").read_text())
    assert job["task"]["clip_norm"] == "none"


# --- as whole processes -------------------------------------------------------------------------


def whole_process(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "allranks.cli.main", "train", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=250, check=False
    )


@pytest.mark.slow
def test_a_whole_process_that_refuses_the_loss(folder: Path) -> None:
    done = whole_process(folder, "bad_tasks:ScalarLoss", "--ranks", "2", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    refusal = done.stderr[done.stderr.index("allranks: this cannot be done") :]
    assert FOUR_PARTS.match(refusal), done.stderr
    assert "Traceback" not in done.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_whole_process_that_refuses_a_file_with_a_syntax_error(folder: Path) -> None:
    (folder / "syntax.py").write_text("def broken(:\n    pass\n")
    done = whole_process(folder, "syntax.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert FOUR_PARTS.match(done.stderr), done.stderr
    assert "at line 1 of " in done.stderr
    assert [path.name for path in folder.iterdir()] == ["syntax.py"]


def test_a_run_folder_in_use_is_refused_and_left_as_it_is(folder: Path, refuse: Refuse) -> None:
    owner = RunFolder(folder / "taken")
    owner.events.event("started")
    try:
        refusal = refuse("bad_tasks:Good", run_dir="taken")
        assert refusal.found == "a run folder in use by a running job"
        assert is_in_use(owner.path)
    finally:
        owner.close()


@pytest.mark.parametrize("setting", ["lr=nan", "lr=inf", "width=0"])
def test_a_field_that_nobody_can_train_with_leaves_no_folder(
    folder: Path, server: ForkServer, setting: str
) -> None:
    before = below(folder)
    with pytest.raises(RequestError) as refused:
        run_job(resolve("digits", {"run_dir": "r"}, (setting,)), server)
    assert setting.partition("=")[0] in refused.value.asked + refused.value.found
    assert below(folder) == before

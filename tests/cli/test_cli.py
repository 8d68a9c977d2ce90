"""The door: every verb's help, the cards, and what jobs have left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

import allranks
from allranks.catalog import VERBS, load
from allranks.cli import runs
from allranks.cli.main import main
from allranks.cli.options import HELPS, option_groups
from allranks.errors import EXIT_INTERRUPTED, Interrupted, Stopped
from allranks.job.config import Resolved, resolve
from allranks.job.job import GROUPS, Job
from allranks.job.run_folder import JsonLines, RunFolder, rank_events_path, read_events
from allranks.launcher.scripts.plan import CommandRequest, plan_command
from allranks.launcher.scripts.run import write_job
from allranks.launcher.scripts.topology import Host
from allranks.launcher.start import Result
from allranks.strategies.cards import CARDS
from allranks.tools.check.verdict import Verdict
from allranks.tools.script_check.rules.watch import Watched

HOSTS = (Host("here", "127.0.0.1", "lo", 2, (2000, 2001, 2002)),)
SUMMARY: dict[str, Any] = {
    "world_size": 2,
    "nodes": 1,
    "strategy": "ddp",
    "steps": 12,
    "train_loss": 0.25,
    "eval": {"accuracy": 0.975},
    "samples_per_s": 1234.5,
    "weights_sha256": "0" * 64,
    "restarts": 0,
    "resumed_from_step": None,
    "sent_bytes": {"gradients": 12 * 2048, "outputs": 0, "control": 0},
    "card_bytes_per_step": 2048,
    "user_randomness": [],
    "user_buffers": [],
}
Door = Callable[..., tuple[int, str, str]]


@pytest.fixture
def door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Door:
    """`door(*words)`: the exit code, standard output and standard error of `allranks WORDS`."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["allranks", *words])
        code: Any = 0
        try:
            main()
        except SystemExit as left:
            code = left.code
        out, err = capsys.readouterr()
        return int(code or 0), out, err

    return call


# --- words ----------------------------------------------------------------------------------


def test_help_names_every_verb_and_every_exit_code(door: Door) -> None:
    code, out, _ = door("--help")
    assert code == 0
    for verb, (_, meaning) in VERBS.items():
        assert verb in out and meaning.split()[0] in out
    assert "6 a check could not decide, 130 interrupted" in " ".join(out.split())


@pytest.mark.parametrize(
    ("unwatched", "code", "words"),
    [
        ((), 0, "nothing found on 2 ranks"),
        (("Loaders.install: gone",), 6, "undecided: nothing found on 2 ranks, but not all was"),
    ],
)
def test_a_check_that_did_not_watch_all_is_no_pass(
    door: Door,
    monkeypatch: pytest.MonkeyPatch,
    unwatched: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr("allranks.cli.check.run_side_by_side", lambda *args, **more: None)
    watched = Watched(2, (), unwatched)
    monkeypatch.setattr("allranks.cli.check.watched_in", lambda folder: watched)
    left, out, err = door("check", "--json", "--", "python", "-V")
    assert (left, json.loads(out)["decided"]) == (code, code == 0)
    assert words in err


@pytest.mark.parametrize(
    ("options", "steps", "total"),
    [((), 20, None), (("--steps", "7"), 7, 7), (("--job", "job.toml"), 20, 300)],
)
def test_a_check_has_the_schedule_of_the_training(
    door: Door,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: tuple[str, ...],
    steps: int,
    total: int | None,
) -> None:
    (tmp_path / "job.toml").write_text("steps = 300\n")
    checked: list[Job] = []

    def check(resolved: Resolved, *args: Any, **more: Any) -> Verdict:
        checked.append(resolved.job)
        return Verdict("digits", "ddp", (), (), None)

    monkeypatch.setattr("allranks.cli.check.checked_in_scratch", check)
    assert door("check", "digits", *options)[0] == 0
    assert [(job.steps, job.schedule_steps) for job in checked] == [(steps, total)]


def test_what_was_said_of_a_model_at_the_start_is_not_said_again(
    door: Door, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notes = {"model_notes": ["BatchNorm normalises every shard"], "run_dir": "runs/x"}
    result = Result(tmp_path, {**SUMMARY, **notes})
    monkeypatch.setattr("allranks.cli.train.run_job", lambda *args, **more: result)
    code, out, _ = door("train", "digits")
    assert code == 0 and "accuracy   0.9750" in out and "BatchNorm" not in out
    assert "BatchNorm" in door("train", "digits", "--json")[1]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(door: Door, verb: str) -> None:
    """Also `-h`, and also alone: a command keeps the names of its first call, whoever made it."""
    names = load(VERBS[verb][0]).context_settings["help_option_names"]
    assert list(names) == ["-h", "--help"]
    for word in ("--help", "-h"):
        code, out, err = door(verb, word)
        assert code == 0, err
        usage = out.splitlines()[0]
        assert code == 0 and usage.startswith("Usage: ") and f" {verb} [OPTIONS]" in usage


@pytest.mark.parametrize("verb", ["train", "sweep", "check"])
def test_every_option_stands_in_one_group(door: Door, verb: str) -> None:
    """And the ten that people use first stand on top, where the verb has them."""
    command: click.Command = load(VERBS[verb][0])
    groups = option_groups()
    grouped = [name for names in groups.values() for name in names]
    assert len(set(grouped)) == len(grouped) and len(groups["First of all"]) == 10
    options = [option for option in command.params if isinstance(option, click.Option)]
    flags = [option.opts[0] for option in options if not option.hidden]
    assert set(flags) <= set(grouped)
    _, out, _ = door(verb, "--help-all")
    shown = re.findall(r"^  (--\S+)", out, re.MULTILINE)
    assert [flag for flag in shown if flag not in HELPS] == [f for f in grouped if f in flags]
    assert "  -h, --help" in out
    _, short, _ = door(verb, "--help")
    assert set(re.findall(r"^  (--\S+)", short, re.MULTILINE)) < set(shown)


COMMANDS = [
    (verb, *below)
    for verb, (path, _) in VERBS.items()
    for below in [(), *((name,) for name in getattr(load(path), "commands", ()))]
]
NO_DEFAULT = (  # they add something, or name what must be named
    *("--set", "--inject", "--job", "--hosts", "--rendezvous", "--node-rank", "--ranks-per-node"),
    *("--early-stop", "--until", "--best", "--sweep", "--page", "--setup", "--sbatch", "--to"),
    *("--mem-per-cpu", "--mem-per-gpu", "--clean", "--gpus"),
)


@pytest.mark.parametrize("words", [*COMMANDS, ("check", "--")], ids=" ".join)
def test_help_is_one_screen_with_values_and_defaults(
    door: Door, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    before = [word for word in words if word != "--"]
    after = ["--"] if "--" in words else []
    _, out, _ = door(*before, "--help", *after)
    _, whole, _ = door(*before, "--help-all", *after)
    assert len(out.splitlines()) <= 50 and max(map(len, out.splitlines())) <= 88
    assert not re.search("TEXT|INTEGER|FLOAT|RANGE", whole)
    assert not re.search("Accepted|[Rr]efused", out)
    rows = re.findall(r"^  (?:-\w, )?(--\S+) (?! ).*(?:\n {10,}.*)*", whole, re.MULTILINE)
    own = whole.partition("As in torchrun:")[0]
    for flag in rows:
        (row,) = re.findall(rf"^  {flag} .*(?:\n {{10,}}.*)*|$", own, re.MULTILINE)[:1]
        assert not row or flag in NO_DEFAULT or "default" in row, row


def test_help_shows_the_defaults_of_a_job(door: Door) -> None:
    _, out, _ = door("train", "--help-all")
    kinds = [kind for title, kind in GROUPS.items() if title != "Set by check"]
    every = [field for kind in kinds for field in fields(kind)]
    numbers = {f.name: f.default for f in every if type(f.default) in (int, float)}
    assert len(numbers) >= 8
    for name, default in numbers.items():
        flag = f"--{name.replace('_', '-')}"
        (row,) = re.findall(rf"^  {flag} .*(?:\n {{10,}}.*)*", out, re.MULTILINE)
        assert f"(default {default:g})" in " ".join(row.split()), row


PROTECTING = (
    *("--checkpoint-every", "--keep", "--best", "--resume", "--max-restarts", "--hang-timeout"),
    *("--time-limit", "--on-bad-step", "--spike", "--verify-every", "--inject"),
    "--witness",
)


def test_help_names_what_protects_a_job_where_it_can_be_asked_for(door: Door) -> None:
    _, out, _ = door("train", "--help-all")
    for flag in PROTECTING:
        (line,) = [line for line in out.splitlines() if line.strip().startswith(f"{flag} ")]
        assert len(line.split()) > 3, "and says what it does"
    _, out, _ = door("check", "--help-all")
    assert not [flag for flag in PROTECTING if f"{flag} " in out], "a check is over in 20 steps"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--time-limit", "1h30m"], "time_limit", 5400.0),
        (["--time-limit", "1:30:00"], "time_limit", 5400.0),
        (["--hang-timeout", "0"], "hang_timeout", 0.0),
        (
            ["--inject", "kill@step=1", "--inject", "slow@seconds=1"],
            "inject",
            "kill@step=1 slow@seconds=1",
        ),
        (["--best", "min:loss"], "best", "min:loss"),
        (["--keep", "1"], "keep", 1),
        (["--spike", "1.5"], "spike", 1.5),
    ],
)
def test_flags_reach_the_job(
    door: Door, monkeypatch: pytest.MonkeyPatch, words: list[str], name: str, value: Any
) -> None:
    job = job_of(door, monkeypatch, "train", "digits", *words)
    assert getattr(job, name) == value


def test_epochs_are_the_end_whatever_a_file_says_of_steps(
    door: Door, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "asked.toml").write_text('program = "digits"\nsteps = 7\n')
    job = job_of(door, monkeypatch, "train", "--job", "asked.toml")
    assert job.steps == 7
    job = job_of(door, monkeypatch, "train", "--job", "asked.toml", "--epochs", "3")
    assert job.steps is None and job.task == {"epochs": "3"}


def job_of(door: Door, monkeypatch: pytest.MonkeyPatch, *words: str) -> Job:
    """The job that a command line asks for; nothing is run."""
    asked: list[Job] = []

    def run(resolved: Resolved, **keywords: Any) -> None:
        asked.append(resolved.job)
        raise KeyboardInterrupt

    monkeypatch.setattr("allranks.cli.train.run_job", run)
    door(*words)
    return asked[0]


def test_the_version(door: Door) -> None:
    code, out, _ = door("--version")
    assert code == 0 and out.strip().endswith(allranks.__version__)


def test_an_unknown_verb_names_the_nearest(door: Door) -> None:
    code, _, err = door("trian")
    assert code == 2
    assert "no verb 'trian'; did you mean 'train'? known: bench, bisect, certify" in err


def test_ctrl_c_at_any_moment_is_130(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("allranks.cli.train.run_job", interrupted)
    code, _, err = door("train", "digits")
    assert code == 130 and "Traceback" not in err


# --- the cards ------------------------------------------------------------------------------


def test_strategies_lists_all_and_shows_one(door: Door) -> None:
    code, out, _ = door("strategies")
    assert code == 0
    found = re.findall(r"^  (\S+)", out, re.MULTILINE)
    assert sorted(found) == sorted(CARDS) and found.index("single") < found.index("fsdp")
    assert out.count("EXACT: equal to one process") == 1 and out.count("up to the order") == 1
    assert out.count("Take it when ") == len(CARDS)
    out = " ".join(out.split())
    assert "The whole model on every rank: EXACT" in out and "accepted. slowmo" in out
    assert "REFERENCE with reduce=fp16, reduce=bf16, reduce=two-bit" in out
    assert "REFERENCE with mode=async, mode=delta." in out
    code, out, _ = door("strategies", "ddp")
    assert code == 0
    assert out.startswith(f"ddp: {CARDS['ddp'].summary}\n")
    assert max(map(len, out.splitlines())) <= 110
    out = " ".join(out.split())
    assert "gradients are summed one of mean, tree, fp16, bf16, ring(pieces=1)" in out
    assert "hierarchical(group=0,pieces=1), top-k(k=64" in out
    assert "with reduce=fp16 or reduce=bf16, REFERENCE: equal to a loop that rounds" in out
    assert "bucket_mb=25.0" in out and "arXiv 2006.15704" in out


@pytest.mark.parametrize("name", CARDS)
def test_a_card_says_what_each_symbol_of_its_formulas_is(door: Door, name: str) -> None:
    _, out, _ = door("strategies", name)
    formulas = out[out.index("\n  sends ") :].partition("\n  where ")[0].partition("\n  option")[0]
    symbols = set(re.findall(r"(?<![\w-])[A-Zkm](?![\w-])", formulas)) - {"A"}
    symbols |= {word for word in ("tally", "roots") if word in formulas}
    known = re.findall(r"(?:where|^)  +(\w+): ", out, re.MULTILINE)
    known += re.findall(r"(?<![\w-])(\w+)(?: =|:|, the power| positions)", formulas)
    assert symbols <= {*known, "M", "Q", "G"}


def test_strategies_as_json(door: Door) -> None:
    code, out, _ = door("strategies", "--json")
    cards = json.loads(out)
    assert code == 0 and [card["name"] for card in cards] == list(CARDS)
    _, out, _ = door("strategies", "ddp", "--json")
    assert json.loads(out) == next(card for card in cards if card["name"] == "ddp")
    reduce = json.loads(out)["options"]["reduce"]
    assert reduce["choices"][:5] == ["mean", "tree", "fp16", "bf16", "ring"]
    assert list(reduce["guarantees"])[:3] == ["fp16", "bf16", "top-k"]


def test_an_unknown_strategy_is_refused(door: Door) -> None:
    code, _, err = door("strategies", "ddpp")
    assert code == 2
    assert "do:    did you mean 'ddp'? known: " in err


# --- what jobs have left behind ---------------------------------------------------------------


def make_run(path: Path, ended: str = "", summary: dict[str, Any] | None = None) -> RunFolder:
    """A run folder as a job leaves it; `ended` is its last event."""
    folder = RunFolder(path)
    resolved = resolve("digits", {"ranks": 2}, ("lr=0.1",))
    folder.write_job(Resolved(resolved.job, resolved.sources))
    folder.events.event("started", ranks=2, notes=[])
    if summary is not None:
        with JsonLines(rank_events_path(path, 0)) as events:
            events.event("done", summary=summary)
    if ended:
        report = {"report": "rank 1 on here failed first: boom\x1b[2J"} if ended == "failed" else {}
        folder.events.event(ended, **report)
    return folder


@pytest.fixture
def runs_folder(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    make_run(runs / "well", "done", SUMMARY).close()
    make_run(runs / "badly", "failed").close()
    make_run(runs / "stopped", "interrupted").close()
    make_run(runs / "dead").close()
    (runs / "no run").mkdir()
    (runs / "a file").touch()
    return runs


def test_runs_tells_the_state_of_each(door: Door, runs_folder: Path) -> None:
    running = make_run(runs_folder / "going")
    try:
        code, out, _ = door("runs", "--json")
        states = {Path(row["run_dir"]).name: row["state"] for row in json.loads(out)}
        assert code == 0
        assert states == {
            "well": "done",
            "badly": "failed",
            "stopped": "interrupted",
            "dead": "killed",
            "going": "running",
        }
        code, out, _ = door("runs", str(runs_folder))
        assert code == 0 and len(out.splitlines()) == 5
        assert any("done" in line and "accuracy 0.9750" in line for line in out.splitlines())
    finally:
        running.close()


def test_runs_lists_the_newest_first(door: Door, runs_folder: Path) -> None:
    for age, name in enumerate(("dead", "well", "stopped", "badly")):
        os.utime(runs_folder / name / "job.toml", (1e9 - age, 1e9 - age))
    _, out, _ = door("runs", "--json")
    names = [Path(row["run_dir"]).name for row in json.loads(out)]
    assert names == ["dead", "well", "stopped", "badly"]


def test_no_runs_at_all(door: Door) -> None:
    code, out, err = door("runs")
    assert (code, out, err) == (0, "", "no run folder in runs\n")


def test_show_tells_the_result(door: Door, runs_folder: Path) -> None:
    code, out, _ = door("show", str(runs_folder / "well"))
    assert code == 0 and out.startswith("digits × 2: done\naccuracy   0.9750\n")
    assert "2.0 KiB sent by rank 0 in each step" in out
    asked = out.partition("values that were set\n")[2].splitlines()
    assert [" ".join(line.split()) for line in asked] == [
        "ranks 2 command line",
        "task.lr 0.1 command line",
        "the rest has its default; the whole job: allranks show --job "
        f"{shlex.quote(str(runs_folder / 'well'))}",
    ]
    assert "hang_timeout" not in out
    _, out, _ = door("show", str(runs_folder / "well"), "--job")
    assert 'lr = "0.1"' in out and '"task.lr" = "command line"' in out
    _, out, _ = door("show", str(runs_folder / "well"), "--json")
    shown = json.loads(out)
    assert (shown["summary"]["steps"], shown["job"]["ranks"]) == (12, 2)


def test_show_tells_what_went_wrong_on_the_way(door: Door, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "again", "", SUMMARY)
    for step in range(30):
        folder.events.event("bad_step", step=step, bad=f"step {step}: the loss is nan", rank=None)
    folder.events.event("done", exits={})
    folder.close()
    _, out, _ = door("show", "runs/again")
    assert "note: step 3: the loss is nan" in out
    assert "note: and 20 more: see runs/again/events*.jsonl" in out
    assert out.index("accuracy") < out.index("note: ") < out.index("values that were set")


@pytest.mark.parametrize("stopped", [Stopped("after step 2"), Interrupted("after step 2")])
def test_a_replay_that_is_stopped_cannot_be_resumed(
    door: Door, monkeypatch: pytest.MonkeyPatch, stopped: Exception
) -> None:
    """Its folder was a temporary one."""

    def replay_step(request: object) -> None:
        raise stopped

    monkeypatch.setattr(runs, "replay_step", replay_step)
    code, _, err = door("replay", "runs/well", "--step", "2")
    assert code == EXIT_INTERRUPTED
    assert err == "allranks: interrupted: nothing was compared, and the run is as it was\n"


def test_runs_and_show_tell_how_many_ranks_go_on(door: Door, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "elastic", "", SUMMARY)
    folder.events.event("group", members=[1], lost=[0], steps_again=1)
    assert "digits × 2, then 1" in door("runs")[1]
    assert door("show", "runs/elastic")[1].startswith("digits × 2, then 1: running\n")
    folder.events.event("attempt", ranks=2)
    assert door("show", "runs/elastic")[1].startswith("digits × 2: running\n")
    folder.close()


def test_show_tells_of_a_command_what_was_said_of_it(door: Door, tmp_path: Path) -> None:
    plan = plan_command(CommandRequest(("python", "train.py"), 2, max_restarts=3), HOSTS, {})
    folder = RunFolder(tmp_path / "runs" / "script")
    write_job(folder, plan, "0")
    folder.events.event("done", exits={"0": 0, "1": 0})
    folder.close()
    _, out, _ = door("show", "runs/script")
    assert out.startswith("python train.py × 2: done\n")
    asked = out.partition("values that were set\n")[2].splitlines()
    assert [" ".join(line.split()) for line in asked[:-1]] == ["max_restarts 3", "ranks 2"]


def test_show_tells_the_first_fault_and_does_not_steer_the_terminal(
    door: Door, runs_folder: Path
) -> None:
    code, out, _ = door("show", str(runs_folder / "badly"))
    assert code == 0 and out.startswith("digits × 2: failed\n")
    assert "failed first: boom\\x1b[2J" in out and "\x1b" not in out


def test_numbers_that_are_not_finite_are_shown(door: Door, tmp_path: Path) -> None:
    """JSON carries them as text: a training that diverged can be looked at all the same."""
    summary = {**SUMMARY, "train_loss": float("nan"), "eval": {"loss": float("inf")}}
    make_run(tmp_path / "runs" / "diverged", "done", summary).close()
    code, out, _ = door("runs")
    assert code == 0 and "loss inf" in out
    code, out, _ = door("show", "runs/diverged")
    assert code == 0 and "train loss nan" in out


@pytest.mark.parametrize("name", ["nowhere", "runs", "runs/a file", "runs/no run"])
def test_show_of_a_folder_that_is_no_run_is_refused(
    door: Door, runs_folder: Path, name: str
) -> None:
    code, _, err = door("show", name)
    assert code == 2
    problem = {"runs": "no job.toml in it", "runs/no run": "an empty folder: no job.toml in it"}
    assert f"asked: show {name}\nfound: {problem.get(name, f'no folder {name}')}\n" in err


def test_one_broken_folder_does_not_hide_the_others(door: Door, runs_folder: Path) -> None:
    (runs_folder / "no run" / "job.toml").write_text("ranks = ")
    code, out, _ = door("runs")
    assert code == 0 and len(out.splitlines()) == 5
    assert any("no run" in line and "unreadable" in line for line in out.splitlines())
    code, _, err = door("show", "runs/no run")
    assert code == 2 and "found: " in err and "Traceback" not in err


# --- as whole processes -----------------------------------------------------------------------


def test_a_whole_process_trains_and_is_shown(door: Door, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "allranks.cli.main", "train", "bad_tasks:Diverges"]
    done = subprocess.run(
        [*command, "--ranks", "2", "--on-bad-step", "warn", "--run-dir", "runs/one"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "train loss nan over the last epoch" in done.stdout
    assert "step 0: the loss is nan" in done.stderr
    code, out, _ = door("show", "runs/one")
    assert code == 0 and "done" in out.splitlines()[0]


@pytest.mark.slow
def test_ctrl_c_of_a_training_ends_it_with_130(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "allranks.cli.main", "train", "synthetic", "--ranks", "2"]
    with subprocess.Popen(
        [*command, "--epochs", "1000000", "--run-dir", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        try:
            deadline = time.monotonic() + 200
            while not (tmp_path / "run" / "metrics.jsonl").exists():
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=200)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert "allranks: stopped (SIGINT) after step " in err
    assert f"resume with: allranks train --run-dir {tmp_path / 'run'}" in err
    assert "Traceback" not in err
    assert read_events(tmp_path / "run")[-1]["event"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "code"), [(32, 0), (12, 3)])
def test_a_small_number_of_open_files_is_enough_or_is_named(
    limit: int, code: int, tmp_path: Path
) -> None:
    words = f"train digits --ranks 3 --steps 2 --run-dir {tmp_path / 'run'}"
    command = f"ulimit -n {limit}; exec {sys.executable} -m allranks.cli.main {words}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert code == 0 or "ulimit -n 1024" in done.stderr

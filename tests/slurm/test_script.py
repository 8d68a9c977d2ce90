"""Batch scripts: whole texts, and hostile names through bash and through what sbatch reads."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.errors import RequestError
from allranks.launcher.slurm.request import full_name
from allranks.launcher.slurm.script import directive, render
from fake_sbatch import read_script
from site_requests import GOLDEN, golden_request

HERE = Path(__file__).parent
FAKE = HERE.parent / "fake_sbatch.py"
LETTERS = "aZ09 _-./:=@%+,~^'\"\\`$#!&|;<>()[]{}*?" + "éß漢🙂"
TRAPS = [
    "packjob",
    "HetJob",
    "a hetjobpackjob b",
    "#SBATCH --wrap=touch pwned",
    "x #SBATCH --uid=0",
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "\\",
    "\\\\",
    "a\\",
    "\\\"'",
    "--job-name=other",
    " leading and trailing ",
    ": colon first",
    "#",
    "%j%x%u",
    "!! history",
    "a" * 200,
    "|| code=$?",
    "EOF",
    "-",
]
CONTROLS = ["a\nb", "a\0b", "a\rb", "a\tb", "a\x1b[31mb", "a\x7fb", "a\u2028b", "a\u202eb", "a\x85b", "\ud800"]  # fmt: skip


def hostile(count: int) -> list[str]:
    """The traps, and texts made of letters that mean something to somebody; always the same."""
    chance = random.Random(5)
    made = TRAPS[:]
    while len(made) < count:
        parts = chance.choices([*LETTERS, *TRAPS[:14]], k=chance.randint(1, 12))
        name = "".join(parts)
        if name.strip() and len(name.encode()) <= 200:
            made.append(name)
    return made


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_the_whole_script_for_a_site(name: str) -> None:
    """The golden files are written by hand and never by a test."""
    assert render(golden_request(name)) == (HERE / "golden" / f"{name}.sbatch").read_text()


def test_no_golden_script_is_left_over() -> None:
    assert {path.stem for path in (HERE / "golden").iterdir()} == set(GOLDEN)


def test_a_script_is_bash() -> None:
    files = [str(HERE / "golden" / f"{name}.sbatch") for name in GOLDEN]
    _check_syntax(files)


@pytest.mark.slow
def test_two_thousand_hostile_names_arrive_as_they_are(tmp_path: Path) -> None:
    """Each is the job's name, a word of its command, and part of its paths; all arrive unchanged."""
    names = hostile(2000)
    golden = golden_request("taurus-ml")
    files = []
    for number, name in enumerate(names):
        words = ("allranks", "train", "digits", "--set", f"note={name}")
        request = dataclasses.replace(golden, name=name, account=name, folder=f"/w/{name}")
        request = dataclasses.replace(request, command=words)
        file = tmp_path / f"{number:04}.sbatch"
        file.touch(0o600)
        file.write_text(render(request))
        files.append(str(file))
    _check_syntax(files)
    record = tmp_path / "record.jsonl"
    command = [sys.executable, str(FAKE), str(record), "--parsable", "--export=NONE", *files]
    subprocess.run(command, check=True, capture_output=True)
    rows = [json.loads(line) for line in record.read_text("utf-8").splitlines()]
    assert len(rows) == len(names) == 2000
    for name, row in zip(names, rows, strict=True):
        for words in (row["new"], row["old"]):
            assert words[:4] == [
                f"--job-name={name}",
                f"--account={name}",
                "--partition=ml",
                f"--chdir=/w/{name}",
            ]
            assert words[4:] == read_script(render(golden), old=False)[3:]


def test_hostile_words_reach_the_program_as_they_are(tmp_path: Path) -> None:
    """Bash runs the scripts, with a program in the place of allranks that notes its words."""
    names = hostile(150)
    seen = tmp_path / "seen"
    stub = tmp_path / "allranks"
    stub.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" >> {seen}\nexit 0\n')
    stub.chmod(0o755)
    golden = golden_request("taurus-gpu2")
    files = []
    for number, name in enumerate(names):
        request = dataclasses.replace(golden, modules=(), venv="", container=("env", f"X={name}"))
        request = dataclasses.replace(request, command=("allranks", f"{number}", name, f"a={name}"))
        file = tmp_path / f"{number}.sbatch"
        file.write_text(render(request))
        files.append(file)
    _run_all(files, tmp_path)
    words = seen.read_bytes().split(b"\0")[:-1]
    expected = [word for n, name in enumerate(names) for word in (str(n), name, f"a={name}")]
    assert [word.decode() for word in words] == expected


@pytest.mark.parametrize("text", CONTROLS, ids=ascii)
@pytest.mark.parametrize(
    "field",
    ["name", "account", "folder", "output", "run_dir", "venv", "command", "container", "modules", "setup", "options", "site"],
)  # fmt: skip
def test_texts_that_no_line_can_hold_are_refused(field: str, text: str) -> None:
    golden = golden_request("puhti")
    value = (text,) if isinstance(getattr(golden, field), tuple) else text
    with pytest.raises(RequestError) as refused:
        render(dataclasses.replace(golden, **{field: value}))  # type: ignore[arg-type]
    assert str(refused.value).count("\n") == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "  "),
        ("name", "é" * 101),
        ("setup", ("#SBATCH --uid=0",)),
        ("setup", ("  #pbs -l x",)),
        ("options", ("--wrap=touch pwned",)),
        ("options", ("--nodes=99",)),
        ("options", ("--export=ALL",)),
        ("options", ("--array=1-9",)),
        ("options", ("touch pwned",)),
        ("options", ("-J",)),
        ("options", ("--qos=",)),
        ("options", ("--qos x",)),
        ("environment", {"A;touch pwned": "x"}),
        ("environment", {"A": "x\ny"}),
        ("output", "/w/%x/r.slurm-%j.out"),
        ("output", "/w/a\\b.slurm-%j.out"),
    ],
)
def test_other_texts_that_mean_something_else_there_are_refused(field: str, value: object) -> None:
    with pytest.raises(RequestError):
        render(dataclasses.replace(golden_request("puhti"), **{field: value}))  # type: ignore[arg-type]


def test_plain_values_stay_plain() -> None:
    assert directive("--chdir", "/a/b_c-d.e") == "#SBATCH --chdir=/a/b_c-d.e"
    assert directive("--requeue") == "#SBATCH --requeue"
    assert directive("--job-name", "my job") == '#SBATCH --job-name="my job"'
    assert directive("--job-name", "a hetjob") == '#SBATCH --job-name="a het\\job"'


@pytest.mark.parametrize(
    ("option", "decides"),
    [
        ("--gpus=16", "--gpus-per-node"),
        ("--mem-per-c=9000", "--mem"),
        ("--partit=huge", "--partition"),
        ("--tasks-per-node=9", "--ranks-per-node"),
        ("--tasks=9", "--ranks-per-node"),
        ("--ntasks-per-g=2", "--ranks-per-node"),
        ("--tres-per-t=gpu:9", "--gpus-per-node"),
        ("--cpus-per-g=9", "--cpus-per-task"),
        ("--minc=99", "--cpus-per-task"),
        ("--cluster=other", "--cluster"),
        ("--no-r", "--requeue"),
        ("--workd=/x", "--run-dir"),
    ],
)
def test_no_abbreviation_and_no_synonym_passes_what_was_checked(option: str, decides: str) -> None:
    with pytest.raises(RequestError) as refused:
        render(dataclasses.replace(golden_request("puhti"), options=(option,)))
    if option == "--minc=99":  # mincpus, or mincores of an older version
        assert refused.value.do == "write the whole name"
    else:
        assert decides in refused.value.do


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("--qo", "--qos"),
        ("--mail-u", "--mail-user"),
        ("--qos", "--qos"),
        ("--mem", "--mem"),  # whole, though others begin so
        ("--container-image", "--container-image"),  # a plugin's
    ],
)
def test_an_abbreviation_means_what_sbatch_takes_it_for(given: str, means: str) -> None:
    assert full_name(given) == means


@pytest.mark.parametrize("given", ["--n", "--g", "--mem-per", "--s", "--con"])
def test_what_may_mean_several_options_is_refused(given: str) -> None:
    with pytest.raises(RequestError) as refused:
        full_name(given)
    assert "options of sbatch that begin so: --" in refused.value.found


def test_options_besides_are_directives() -> None:
    options = ("--qo=debug", "--exclusive", "--comment=a 'b' #c")
    text = render(dataclasses.replace(golden_request("puhti"), options=options))
    assert read_script(text, old=False)[-3:] == ["--qos=debug", "--exclusive", "--comment=a 'b' #c"]


# --- how the script ends --------------------------------------------------------------------


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A folder with an `scontrol` that notes its words, and an `allranks` that is told its code."""
    for name, body in {
        "scontrol": 'echo "$@" >> scontrol.seen',
        "allranks": 'trap "touch got-term" TERM; touch started; '
        'for i in $(seq 200); do [ -e go ] && break; sleep 0.05; done; exit "$(cat code)"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def _script(stage: Path, requeue: bool) -> Path:
    request = dataclasses.replace(
        golden_request("taurus-ml"),
        modules=(),
        venv="",
        requeue=requeue,
        command=("allranks",),
    )
    path = stage / "job.sbatch"
    path.write_text(render(request))
    return path


def _environment(stage: Path) -> dict[str, str]:
    return {"PATH": f"{stage}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "HOME": str(stage)}


@pytest.mark.parametrize(
    ("requeue", "code", "requeued"),
    [(True, 0, False), (True, 1, False), (True, 4, True), (False, 4, False), (True, 130, False)],
)
def test_only_a_job_that_stopped_early_is_put_back(
    stage: Path, requeue: bool, code: int, requeued: bool
) -> None:
    (stage / "code").write_text(str(code))
    (stage / "go").touch()
    script = _script(stage, requeue)
    done = subprocess.run(["bash", script], cwd=stage, env=_environment(stage), check=False)
    assert done.returncode == code
    seen = stage / "scontrol.seen"
    assert (seen.read_text() if seen.exists() else "") == ("requeue 77\n" if requeued else "")


def test_a_cancelled_job_waits_for_its_program_and_is_not_put_back(stage: Path) -> None:
    """scancel sends SIGTERM to all processes of the job: the shell must outlive the checkpoint."""
    (stage / "code").write_text("4")
    command = ["bash", str(_script(stage, True))]
    with subprocess.Popen(
        command, cwd=stage, env=_environment(stage), start_new_session=True
    ) as job:
        while not (stage / "started").exists():
            assert job.poll() is None
            time.sleep(0.01)
        os.killpg(job.pid, signal.SIGTERM)
        while not (stage / "got-term").exists():
            assert job.poll() is None, "the shell died before its program"
            time.sleep(0.01)
        (stage / "go").touch()
        assert job.wait() == 4
    assert not (stage / "scontrol.seen").exists()


def _check_syntax(files: list[str]) -> None:
    """`bash -n` on each of them."""
    loop = 'for f in "$@"; do bash -n "$f" || exit 1; done'
    command = ["bash", "-c", loop, "-", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def _run_all(files: list[Path], folder: Path) -> None:
    loop = 'for f in "$@"; do bash "$f" || exit 1; done'
    command = ["bash", "-c", loop, "-", *map(str, files)]
    done = subprocess.run(
        command, cwd=folder, env=_environment(folder), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (folder / "pwned").exists()

"""A job from its words: command line > file > default, and a job file that can be run again."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import RequestError
from allranks.job.config import Resolved, resolve, threads_per_rank
from allranks.job.job import (
    FOR_CHECK,
    GROUPS,
    NOT_SETTABLE,
    Job,
    names_in,
    read_job_file,
    write_toml,
)
from allranks.job.run_folder import RunFolder

PLAIN = st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False)


def job_file(folder: Path, text: str) -> str:
    path = folder / "asked.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- precedence -----------------------------------------------------------------------------


def test_the_command_line_goes_before_the_file_and_the_file_before_the_default(
    tmp_path: Path,
) -> None:
    path = job_file(
        tmp_path, 'program = "digits"\nranks = 2\nseed = 3\n[task]\nlr = 0.1\nwidth = 8\n'
    )
    found = resolve("", {"seed": 5}, ("lr=0.2",), path)
    job, sources = found.job, found.sources
    assert (job.program, job.ranks, job.seed, job.precision) == ("digits", 2, 5, "fp32")
    assert job.task == {"lr": "0.2", "width": 8}
    assert sources["ranks"] == sources["task.width"] == f"file {path}"
    assert sources["seed"] == sources["task.lr"] == "command line"
    assert sources["precision"] == sources["strategy"] == "default"
    assert set(sources) >= {f.name for f in dataclasses.fields(Job)} - set(NOT_SETTABLE)


def test_every_value_of_a_job_stands_in_one_group_and_in_its_order() -> None:
    """The groups are what `--help` and `--dry-run` show; the fields are what job files hold."""
    grouped = [name for group in GROUPS.values() for name in names_in(group)]
    assert grouped == [field.name for field in dataclasses.fields(Job)]
    shown = [name for values in Job().grouped().values() for name in values]
    assert shown == [name for name in grouped if name not in NOT_SETTABLE]


def test_a_program_on_the_command_line_goes_before_that_of_the_file(tmp_path: Path) -> None:
    path = job_file(tmp_path, 'program = "digits"\n')
    found = resolve("synthetic", {}, (), path)
    assert found.job.program == "synthetic" and found.sources["program"] == "command line"


def test_the_strategy_follows_the_ranks_unless_it_is_asked_for() -> None:
    assert resolve("digits", {}).job.strategy == "single"
    assert resolve("digits", {"ranks": 2}).job.strategy == "ddp"
    assert resolve("digits", {"ranks": 2, "bitwise": True}).job.strategy == "ddp:reduce=tree"
    assert resolve("digits", {"ranks": 1, "strategy": "ddp"}).job.strategy == "ddp"


def test_threads_are_the_cores_shared_out_and_one_under_bitwise() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(Job(), 1) == cores
    assert threads_per_rank(Job(), 10**6) == 1
    assert threads_per_rank(Job(threads=3), 2) == 3
    assert threads_per_rank(Job(bitwise=True), 1) == 1


# --- job.toml -------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{"strategy": "mirrored"}, {"engine": "tensorflow"}])
def test_a_program_of_torch_names_its_twin_for_tensorflow(flags: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        resolve("digits", flags)
    assert refused.value.do == "allranks train digits-keras"
    with pytest.raises(RequestError) as refused:
        resolve("text", flags)
    assert "digits-keras and mnist-keras" in refused.value.why


@given(plain=st.dictionaries(st.text(), PLAIN), table=st.dictionaries(st.text(), PLAIN))
def test_toml_carries_any_names_and_any_values(
    plain: dict[str, Any], table: dict[str, Any]
) -> None:
    plain.pop("task", None)
    values = {**plain, "task": table}
    assert tomllib.loads(write_toml(values)) == values


def test_toml_carries_what_no_terminal_shows() -> None:
    hostile = 'a"b\\c\n\r\t\0\x7f\u2028\u200b\U000e0001\U0001f600 [task]\n# no comment'
    assert tomllib.loads(write_toml({"text": hostile, hostile: 1})) == {
        "text": hostile,
        hostile: 1,
    }


def test_toml_leaves_out_what_is_none() -> None:
    assert tomllib.loads(write_toml({"a": None, "b": 1, "c": {"d": None}})) == {"b": 1, "c": {}}


def test_the_job_of_a_run_folder_can_be_run_again(tmp_path: Path) -> None:
    flags = {"ranks": 3, "seed": 7, "bitwise": True, "micro_batch": 4, "strategy": "ddp"}
    first = resolve("my task.py:A", {**flags, "run_dir": "gone"}, ("lr=0.1", 'name=a"\n'))
    folder = RunFolder(tmp_path / "run")
    folder.write_job(first)
    folder.close()
    again = resolve("", {}, (), str(tmp_path / "run" / "job.toml"))
    assert again.job == dataclasses.replace(first.job, run_dir="")


def test_job_toml_holds_the_source_of_every_value(tmp_path: Path) -> None:
    first = resolve("digits", {"ranks": 2}, ("lr=0.1",))
    folder = RunFolder(tmp_path / "run")
    folder.write_job(Resolved(first.job, first.sources))
    folder.close()
    data = tomllib.loads((tmp_path / "run" / "job.toml").read_text())
    assert data["schema"] == 1 and data["task"] == {"lr": "0.1"}
    assert data["source"] == first.sources
    assert not set(FOR_CHECK) & set(data)


# --- the resumed run --------------------------------------------------------------------------


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A run folder as a job leaves it, without a checkpoint."""
    flags = {"ranks": 3, "seed": 7, "steps": 9, "inject": "kill@step=3", "run_dir": "gone"}
    asked = resolve("digits", flags, ("lr=0.1", "width=8"))
    folder = RunFolder(tmp_path / "left")
    folder.write_job(asked)
    folder.close()
    return folder.path


def test_what_is_not_said_again_stays_as_it_was(left: Path, tmp_path: Path) -> None:
    """Command line > job file > run > default; a fault on purpose is made once."""
    path = job_file(tmp_path, "steps = 20\nkeep = 5\n[task]\nwidth = 16\n")
    found = resolve("", {"run_dir": str(left), "keep": 2}, ("lr=0.2",), path)
    job, sources = found.job, found.sources
    assert (job.program, job.ranks, job.seed, job.steps, job.keep) == ("digits", 3, 7, 20, 2)
    assert job.task == {"lr": "0.2", "width": 16}
    assert (job.inject, job.resume, job.run_dir) == ("", "", str(left))
    assert sources["ranks"] == sources["program"] == f"run {left}"
    assert sources["steps"] == sources["task.width"] == f"file {path}"
    assert sources["keep"] == sources["task.lr"] == "command line"
    assert sources["inject"] == "default"
    assert found.base is not None and found.base.resumes


def test_never_takes_nothing_over(left: Path) -> None:
    found = resolve("digits", {"run_dir": str(left), "resume": "never"})
    assert found.base is None and (found.job.seed, found.job.task) == (0, {})
    assert found.job.resume == ""


def test_the_strategy_follows_the_ranks_when_a_run_outgrows_one_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "one")
    folder.write_job(resolve("digits", {}))
    folder.close()
    assert resolve("", {"run_dir": str(folder.path), "ranks": 4}).job.strategy == "ddp"
    with pytest.raises(RequestError):
        resolve("", {"run_dir": str(folder.path), "ranks": 4, "strategy": "single"})


@pytest.mark.parametrize("name", ["program", "run_dir", "resume"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as refused:
        resolve("", {"program": "digits", name: "a\0b"})
    assert refused.value.found == "a NUL in it"


# --- what is refused ------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"program": ""}, (), "no PROGRAM, and no job file that names one"),
    (
        {"program": "", "run_dir": "runs/nothere"},
        (),
        "no PROGRAM, and no job file that names one: there is no run in runs/nothere",
    ),
    ({"ranks": 0}, (), "0"),
    ({"ranks": -2}, (), "-2"),
    ({"micro_batch": 0}, (), "0"),
    ({"steps": 0}, (), "0"),
    ({"threads": 0}, (), "0"),
    ({"seed": -1}, (), "-1"),
    ({"seed": 2**63}, (), str(2**63)),
    ({"loader_workers": -1}, (), "-1"),
    ({"nodes": 2}, (), "--place local, which is one node"),
    ({"precision": "fp8"}, (), "no precision of that name in this version"),
    ({"share_device": True}, (), "--device cpu"),
    (
        {"share_device": True, "device": "cuda", "strategy": "dp:replicas=2"},
        (),
        "one rank with 2 replicas",
    ),
    (
        {"share_device": True, "device": "cuda", "program": "digits-keras"},
        (),
        "share_device = True",
    ),
    ({"backend": "gloo", "device": "cuda"}, (), "--device cuda"),
    ({"device": "gpu"}, (), "no device of that name in this version"),
    ({"place": "cloud"}, (), "no place of that name in this version"),
    ({"bitwise": True, "threads": 2}, (), "2 threads in each rank"),
    ({"ranks": 2, "strategy": "single"}, (), "'single' is one process"),
    ({"strategy": "fsdb"}, (), "no strategy 'fsdb'"),
    ({}, ("lr",), "no '=' in it"),
]


@pytest.mark.parametrize(("flags", "settings", "found"), REFUSED, ids=str)
def test_what_cannot_be_is_refused_in_four_parts(
    flags: dict[str, Any], settings: tuple[str, ...], found: str
) -> None:
    with pytest.raises(RequestError) as refused:
        resolve("", {"program": "digits", **flags}, settings)
    assert refused.value.exit_code == 2
    assert refused.value.found == found
    assert all(refused.value.to_data().values())


@pytest.mark.parametrize(
    ("text", "found", "do"),
    [
        ("ranks = ", None, "check the path and the line"),
        ('program = "digits"\nrank = 2\n', "no value 'rank' in a job", "did you mean 'ranks'?"),
        ('program = "digits"\nranks = 2.5\n', "2.5", "give ranks a value of that type"),
        ('program = "digits"\nranks = true\n', "True", "give ranks a value of that type"),
        ('program = "digits"\ntrace = true\n', "no value 'trace' in a job", ""),
        ('program = "digits"\n[strategies]\na = 1\n', "no value 'strategies' in a job", ""),
        ("schema = 99\n", "schema 99", ""),
        ("task = 3\n", None, ""),
        ("ranks = 2\n", "no PROGRAM, and no job file that names one", ""),
    ],
)
def test_a_job_file_that_cannot_be_is_refused(
    tmp_path: Path, text: str, found: str | None, do: str
) -> None:
    path = job_file(tmp_path, text)
    with pytest.raises(RequestError) as refused:
        resolve("", {}, (), path)
    assert found is None or refused.value.found == found
    assert refused.value.do.startswith(do)
    assert all(refused.value.to_data().values())


def test_a_value_of_a_job_file_is_blamed_on_the_file(tmp_path: Path) -> None:
    path = job_file(tmp_path, 'program = "digits"\nranks = "many"\n')
    with pytest.raises(RequestError) as refused:
        read_job_file(path)
    assert path in refused.value.asked and "--set" not in refused.value.asked


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "no text"])
def test_a_job_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "job.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError) as refused:
        read_job_file(str(path))
    assert refused.value.asked == f"--job {path}"


def test_bytes_that_are_no_text_are_refused_before_they_reach_a_file() -> None:
    """An argument that is not UTF-8 reaches Python with surrogates, which TOML cannot hold."""
    for program, setting in (("task\udcff.py", "lr=1"), ("digits", "name=\udcff")):
        with pytest.raises(RequestError):
            resolve(program, {}, (setting,))


def test_who_takes_another_strategy_leaves_no_first_check_out(tmp_path: Path) -> None:
    lines = ("program", "digits"), ("strategy", "zero2"), ("first_check", "off")
    text = "".join(f'{name} = "{value}"\n' for name, value in lines)
    (tmp_path / "job.toml").write_text(f"{text}ranks = 2\n")
    same = resolve("", {"run_dir": str(tmp_path)})
    other = resolve("", {"run_dir": str(tmp_path), "strategy": "fsdp"})
    assert (same.job.first_check, other.job.first_check) == ("off", "auto")


def test_who_asks_for_a_gpu_is_told_its_name() -> None:
    with pytest.raises(RequestError, match="did you mean 'cuda'"):
        resolve("digits", {"device": "gpu"})

"""Dockerfile and allranks.def: what can be tried of them where no image can be fetched.

Their commands run with stand-ins for apt-get and pip, which note what they are told.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from allranks.cli.main import cli
from conftest import ROOT

CPU_BUILDS = "https://index.example.org/cpu"
FOLDER = "/opt/allranks"
LINES = re.sub(r"^#.*\n|\\\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).splitlines()
DOCKER = [line.split(maxsplit=1) for line in LINES if line]
HEAD, *PARTS = re.split(r"^%(\w+)\n", (ROOT / "allranks.def").read_text(), flags=re.M)
APPTAINER = dict(zip(PARTS[::2], PARTS[1::2], strict=True))


def docker(instruction: str) -> list[str]:
    """What stands behind each such instruction."""
    return [words for name, words in DOCKER if name == instruction]


def told(script: str, folder: Path, variables: dict[str, str]) -> list[str]:
    """What apt-get and pip are told when the script runs in a folder."""
    folder.mkdir()
    for name in ("apt-get", "pip"):
        stand_in = folder / name
        stand_in.write_text(f'#!/bin/sh\necho {name} "$@" >> "{folder}/told"\n')
        stand_in.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    subprocess.run(
        ["sh", "-c", script.replace(FOLDER, str(folder))], cwd=folder, env=environment, check=True
    )
    return (folder / "told").read_text().splitlines()


@pytest.mark.parametrize("index", ["", CPU_BUILDS])
def test_both_install_the_same(tmp_path: Path, index: str) -> None:
    (run,) = docker("RUN")
    of_docker = told(run, tmp_path / "docker", {"TORCH_INDEX": index})
    asked = re.sub(r"\{\{ torch_index \}\}", index or "none", APPTAINER["post"])
    assert told(asked, tmp_path / "apptainer", {}) == of_docker
    assert [line for line in of_docker if "--index-url" in line] == (
        [f"pip install --no-cache-dir --constraint constraints.txt --index-url {index} torch"]
        if index
        else []
    )
    assert of_docker[-1].endswith(" .[digits]")


def test_both_begin_alike_and_hold_the_same_files() -> None:
    assert re.findall(r"^From: (.*)$", HEAD, re.M) == docker("FROM")
    assert re.findall(r"^Bootstrap: (.*)$", HEAD, re.M) == ["docker"]
    copied = [name for words in docker("COPY") for name in words.split()[:-1]]
    files = dict(line.split() for line in APPTAINER["files"].splitlines() if line)
    assert files == {name: f"{FOLDER}/{name}" for name in copied}
    assert all((ROOT / name).exists() for name in copied)
    assert docker("WORKDIR")[0] == FOLDER
    assert set(APPTAINER) == {"arguments", "files", "post", "environment", "runscript", "test"}


def test_the_commands_of_both_exist() -> None:
    (entry,), (words,) = docker("ENTRYPOINT"), docker("CMD")
    assert json.loads(entry) == ["allranks"]
    (line,) = re.findall(r"^ *allranks (.*)$", APPTAINER["test"], re.M)
    assert CliRunner().invoke(cli, json.loads(words)).exit_code == 0
    name, *options = shlex.split(line)
    verb = cli.get_command(click.Context(cli), name)
    assert verb is not None
    verb.make_context(name, options)  # it takes these options
    for part in ("environment", "runscript", "test"):
        subprocess.run(["sh", "-n"], input=APPTAINER[part], text=True, check=True)

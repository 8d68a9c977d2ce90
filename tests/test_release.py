"""`make release`: what it refuses, and that nothing leaves the machine unless it is asked to.

In a repository of its own, with a make and a twine that only note what they are told.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import allranks
from conftest import ROOT

VERSION = "7.8.9"
Release = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def release(tmp_path: Path) -> Release:
    """`release(version, typed)`: what `make release VERSION=…` does in `tmp_path / "clone"`."""
    clone, programs = tmp_path / "clone", tmp_path / "programs"
    files = {
        clone / "src" / "allranks" / "__init__.py": f'__version__ = "{VERSION}"\n',
        clone / "CITATION.cff": f"version: {VERSION}\n",
        clone / "CHANGELOG.md": f"## {VERSION}, 2026-11-28\n",
        clone / ".gitignore": ".venv/\ndist/\n",
        clone / "dist" / "allranks.whl": "",
        clone / ".venv" / "bin" / "twine": '#!/bin/sh\necho "twine $*" >> ../told\n',
        programs / "make": '#!/bin/sh\necho "make $*" >> ../told\n',
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (clone / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "release", clone / ".ci" / "release")
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        **{f"GIT_{role}_NAME": "A" for role in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{role}_EMAIL": "a@example.org" for role in ("AUTHOR", "COMMITTER")},
    }

    def git(*words: str) -> None:
        subprocess.run(["git", *words], cwd=clone, env=environment, check=True)

    git("init", "--quiet", "--bare", str(tmp_path / "origin"))
    git("init", "--quiet", ".")
    git("remote", "add", "origin", str(tmp_path / "origin"))
    git("add", ".")
    git("commit", "--quiet", "--message", "all")

    def run(version: str = VERSION, typed: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", ".ci/release", version],
            cwd=clone,
            env=environment,
            input=typed,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def pushed(tmp_path: Path) -> str:
    tags = ["git", "-C", str(tmp_path / "origin"), "tag"]
    return subprocess.check_output(tags, text=True)


@pytest.mark.parametrize("typed", ["", "yes\n", f"{VERSION}\n"])
def test_it_publishes_only_when_the_version_is_typed(
    release: Release, tmp_path: Path, typed: str
) -> None:
    done = release(typed=typed)
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "told").read_text()
    assert told.startswith("make check docs test test-full dist\n")
    publishes = typed.strip() == VERSION
    assert ("twine upload dist/allranks.whl" in told) == publishes
    assert pushed(tmp_path) == (f"v{VERSION}\n" if publishes else "")
    assert ("Nothing left this machine" in done.stdout) != publishes
    again = release()
    assert again.returncode == 2 and f"found: the tag v{VERSION}\n" in again.stderr


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        (
            "src/allranks/__init__.py",
            '__version__ = "7.8.8"\n',
            "7.8.8 in src/allranks/__init__.py",
        ),
        ("CITATION.cff", "version: 7.8.8\n", "7.8.8 in CITATION.cff"),
        ("CHANGELOG.md", f"## {VERSION}, unreleased\n", f"no “## {VERSION}, "),
        ("left.txt", "", "?? left.txt, not committed"),
    ],
)
def test_it_refuses_before_it_does_anything(
    release: Release, tmp_path: Path, file: str, text: str, found: str
) -> None:
    (tmp_path / "clone" / file).write_text(text)
    done = release(typed=f"{VERSION}\n")
    assert done.returncode == 2
    said = re.findall(r"^(asked|found|why|do):", done.stderr, re.M)
    assert said == ["asked", "found", "why", "do"], done.stderr
    assert f"found: {found}" in done.stderr
    assert not (tmp_path / "told").exists() and not pushed(tmp_path)


@pytest.mark.parametrize("version", ["", "v7.8.9", "7.8", f"{VERSION}; touch told"])
def test_it_takes_three_numbers(release: Release, version: str) -> None:
    done = release(version, f"{VERSION}\n")
    assert done.returncode == 2 and f"make release VERSION={VERSION}" in done.stderr


def test_every_file_names_this_version() -> None:
    for file, pattern in {
        "CITATION.cff": r"^version: (.*)$",
        "CHANGELOG.md": r"^## ([^,]*), (?:unreleased|\d{4}-\d{2}-\d{2})$",
    }.items():
        first = re.findall(pattern, (ROOT / file).read_text(), re.M)[0]
        assert first == allranks.__version__, file

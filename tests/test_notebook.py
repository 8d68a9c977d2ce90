"""The notebook among the examples, run as Jupyter runs it: a kernel, two ranks,
and nothing left."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from allranks.cli.display.following import FollowedJob
from allranks.cli.display.live import Picture, as_output
from conftest import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
PATIENCE_S = 500
RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def outputs_of(notebook: Path) -> dict[str, list[dict[str, Any]]]:
    """The outputs of each code cell, by its id."""
    cells = json.loads(notebook.read_text())["cells"]
    return {cell["id"]: cell["outputs"] for cell in cells if cell["cell_type"] == "code"}


def text_of(output: dict[str, Any]) -> str:
    """An output as text; the format allows a list of lines for one."""
    text = output["text"] if "text" in output else output["data"]["text/plain"]
    return "".join(text)


def of_this_test(mark: str) -> list[int]:
    """The living processes that were started with this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_the_example_holds_no_outputs() -> None:
    assert not any(outputs_of(NOTEBOOK).values())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_notebook_trains_the_task_that_it_defines(tmp_path: Path) -> None:
    homes = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR")
    environment = {**os.environ, **{name: str(tmp_path / name) for name in homes}}
    done = subprocess.run(
        [sys.executable, "-c", RUN, NOTEBOOK, "done.ipynb"],
        cwd=tmp_path,
        env={**environment, "ALLRANKS_TEST_OF": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = outputs_of(tmp_path / "done.ipynb")
    (display,) = outputs["launch"]  # one, drawn over and over
    picture = text_of(display)
    assert "Spirals on 2 ranks, ddp: " in picture and "step 100 of 100" in picture
    assert "2 ranks" in "".join(display["data"]["text/html"])
    accuracy = re.search(r"accuracy +(0\.\d+)", text_of(outputs["result"][0]))
    assert accuracy is not None and float(accuracy[1]) > 0.9
    assert accuracy[1] in text_of(outputs["weights"][0])
    programs = tmp_path / "runs" / "programs"
    pickled, program = sorted(path for path in programs.iterdir() if path.is_file())
    assert pickled.suffix == ".pickle"
    assert program.read_text().startswith('"""Spirals, as it was in a notebook')
    assert f'program = "runs/programs/{program.name}:Spirals"' in (
        next(tmp_path.glob("runs/*/job.toml")).read_text()
    )
    assert not of_this_test(f"ALLRANKS_TEST_OF={tmp_path}")


def test_what_was_told_and_the_picture_are_one_output() -> None:
    """As on a terminal of that width; what a program said is no markup, and steers nothing."""
    picture = Picture(FollowedJob(ranks=2))
    output = as_output(["rank 0: <b>[red]\x1b[2J"], picture)
    paper = io.StringIO()
    Console(file=paper, width=100, color_system=None).print(picture)
    said = "rank 0: <b>[red]\\x1b[2J\n"
    assert output["text/plain"] == said + paper.getvalue().rstrip("\n")
    assert "&lt;b&gt;[red]" in output["text/html"] and "\x1b" not in output["text/html"]

"""`allranks new`: every template trains and checks as it is written; no file is overwritten."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from allranks.cli.main import cli
from allranks.cli.templates.new import TEMPLATES, new
from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.engines import preload_for
from allranks.job.program import find_program
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import run_job
from allranks.tools.check.against_single import CheckPlan, check_against_one
from allranks.torch import Task
from conftest import MODULES, Train

ON_TORCH = ["plain", "images"] + ["transformers"] * (find_spec("transformers") is not None)
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """`write(template)`: the name of the file that was written from it, here."""
    monkeypatch.chdir(tmp_path)

    def run(template: str) -> str:
        done = CliRunner().invoke(cli, ["new", template, f"my_{template}.py"])
        assert done.exit_code == 0, done.output
        train, check = (line.split() for line in done.output.splitlines()[1:])
        assert train == ["allranks", "train", f"my_{template}.py", "--ranks", "2"]
        assert check == ["allranks", "check", f"my_{template}.py", "--ranks", "2"]
        assert f"allranks train my_{template}.py" in Path(f"my_{template}.py").read_text()
        return train[2]

    return run


def _is_equal(program: str, server: ForkServer, folder: Path, **flags: Any) -> bool | None:
    plan = CheckPlan((2,), 2, shards=8)
    resolved = resolve(program, {"ranks": 2, "steps": 3, **flags}, ())
    return check_against_one(resolved, folder, server, plan).equal


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("template", ON_TORCH)
def test_a_template_trains_learns_and_is_equal_to_one_process(
    write: Write, tmp_path: Path, template: str
) -> None:
    program = write(template)
    with ForkServer((*preload_for(program), *MODULES)) as server:  # it imports transformers once
        flags = {"ranks": 2, "strategy": "ddp", "run_dir": str(tmp_path / "run")}
        figures = run_job(resolve(program, flags, ()), server).summary["eval"]
        assert figures["accuracy"] > {"plain": 0.9, "images": 0.5, "transformers": 0.2}[template]
        assert _is_equal(program, server, tmp_path, strategy="ddp")


@pytest.mark.slow
def test_the_template_of_keras_does_so_with_tensorflow(
    write: Write, train_tf: Train, tf_server: ForkServer, tmp_path: Path
) -> None:
    program = write("keras")
    assert train_tf(program, ranks=2).summary["eval"]["accuracy"] > 0.9
    assert _is_equal(program, tf_server, tmp_path, engine="tensorflow")


def test_help_names_every_template() -> None:
    out = CliRunner().invoke(cli, ["new", "--help"]).output
    assert all(f"  {name} " in out and meaning in out for name, meaning in TEMPLATES.items())


@pytest.mark.parametrize(
    ("words", "found", "do"),
    [
        (("plain", "there.py"), "there.py is there", "allranks new plain OTHER.py"),
        (("plian", "a.py"), "no template 'plian'", "did you mean 'plain'?"),
        (("plain", "a.txt"), "the name 'a.txt'", "a name like mytask.py"),
        (
            ("transformers", "transformers.py"),
            "the name 'transformers.py'",
            "a name like mytask.py",
        ),
        (("plain", "class.py"), "the name 'class.py'", "a name like mytask.py"),
        (("plain", "nowhere/a.py"), "No such file or directory", "name a file in a folder"),
    ],
)
def test_nothing_is_overwritten_or_half_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, str],
    found: str,
    do: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.py").write_text("mine")
    with pytest.raises(RequestError) as error:
        new.main(list(words), standalone_mode=False)
    assert error.value.found == found and error.value.do.startswith(do)
    assert error.value.exit_code == 2
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("there.py", "mine")]


def test_a_module_that_is_missing_is_named_with_the_way_to_it(write: Write) -> None:
    program = Path(write("transformers"))
    program = program.rename("no_such_library_task.py")
    program.write_text(program.read_text().replace("from transformers", "from no_such_library.a"))
    with pytest.raises(RequestError) as error:
        find_program(str(program), Task)
    assert error.value.found.startswith("no module 'no_such_library' in this Python at line ")
    assert error.value.do == "pip install no_such_library, or write its right name"
    program.write_text("import cv2.no_such_part\n")
    with pytest.raises(RequestError) as error:
        find_program(str(program), Task)
    assert error.value.do == "pip install opencv-python, or write its right name"

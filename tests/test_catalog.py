"""From the name of a program to its class, and every way in which that can fail."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.catalog import PROGRAMS
from allranks.errors import RequestError
from allranks.job.engines import preload_for
from allranks.job.program import find_program

HEADER = "from test_catalog import Base\n\n"


class Base:
    """What a program must be derived from, here."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; what a test imports is forgotten after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = dict(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER + text)


def refused(program: str) -> RequestError:
    with pytest.raises(RequestError) as error:
        find_program(program, Base)
    assert error.value.asked == f"PROGRAM {program!r}"
    assert all(error.value.to_data().values())
    return error.value


# --- what is found --------------------------------------------------------------------------


def test_a_file_with_one_task(folder: Path) -> None:
    write(folder / "catalog_one.py", "class Mine(Base): value = 3")
    assert find_program("catalog_one.py", Base).value == 3
    assert find_program(str(folder / "catalog_one.py"), Base).value == 3
    assert find_program("catalog_one.py:Mine", Base).value == 3


def test_one_of_two_tasks_by_name(folder: Path) -> None:
    write(folder / "catalog_two.py", "class A(Base): value = 1\nclass B(A): value = 2")
    assert find_program("catalog_two.py:A", Base).value == 1
    assert find_program("catalog_two.py:B", Base).value == 2
    assert "2 tasks in it (A, B)" in refused("catalog_two.py").found
    assert refused("catalog_two.py").do == "name one: catalog_two.py:A"
    write(folder / "catalog_three.py", "class M(Base): pass\nclass A(M): pass\nclass B(M): pass")
    assert refused("catalog_three.py").do == "name one: catalog_three.py:M"


def test_a_task_that_is_only_imported_is_not_the_files_own(folder: Path) -> None:
    write(folder / "catalog_base.py", "class Theirs(Base): pass")
    write(folder / "catalog_own.py", "from catalog_base import Theirs\nclass Mine(Theirs): pass")
    assert find_program("catalog_own.py", Base).__name__ == "Mine"
    assert find_program("catalog_own.py:Theirs", Base).__name__ == "Theirs"


def test_a_module_of_the_current_folder(folder: Path) -> None:
    write(folder / "catalog_package" / "inner.py", "class Mine(Base): value = 4")
    assert find_program("catalog_package.inner:Mine", Base).value == 4


@pytest.mark.parametrize("where", ["with space/my task.py", "über/a-b.py", "a:b/catalog_colon.py"])
def test_a_file_in_a_place_with_any_name(folder: Path, where: str) -> None:
    write(folder / where, "class Mine(Base): value = 5")
    assert find_program(str(folder / where), Base).value == 5
    assert find_program(f"{folder / where}:Mine", Base).value == 5


def test_a_built_in_program_is_there_and_may_be_loaded_before_the_fork() -> None:
    for program, path in PROGRAMS.items():
        module = path.partition(":")[0]
        assert importlib.util.find_spec(module) is not None
        assert preload_for(program)[-1] == module


def test_a_file_of_a_user_is_never_loaded_before_the_fork() -> None:
    assert preload_for("mine.py") == preload_for("mine:Task")
    assert all(module.startswith("allranks.") for module in preload_for("mine.py"))


def test_keras_is_loaded_once_for_all_ranks_of_a_file_that_needs_it(folder: Path) -> None:
    keras = folder / "with_keras.py"
    keras.write_text("from allranks.tensorflow import Task\nclass Mine(Task): pass\n")
    assert "allranks.torch.keras.preload" in preload_for(str(keras), "torch")
    assert "allranks.torch.keras.preload" in preload_for(f"{keras}:Mine", "torch")
    assert "allranks.torch.keras.preload" not in preload_for("mine.py", "torch")


# --- what is refused ------------------------------------------------------------------------


def test_an_unknown_name_names_the_nearest() -> None:
    assert refused("digts").do.startswith("did you mean 'digits'?")
    assert "neither a built-in program" in refused("digts").found


def test_a_missing_file_and_a_missing_module() -> None:
    assert refused("nowhere.py").found.startswith("no file nowhere.py in ")
    assert refused("catalog_nowhere:Mine").found.startswith("ModuleNotFoundError")


def test_an_unknown_class_names_the_nearest(folder: Path) -> None:
    write(folder / "catalog_class.py", "class Mine(Base): pass\nother = 3")
    assert refused("catalog_class.py:Mien").do == "did you mean 'Mine'? known: Base, Mine" or (
        refused("catalog_class.py:Mien").do == "did you mean 'Mine'? known: Mine"
    )
    assert refused("catalog_class.py:other").found == "that name is no task there"


def test_a_file_without_a_task(folder: Path) -> None:
    write(folder / "catalog_none.py", "other = 3")
    assert refused("catalog_none.py").found == "0 tasks in it (none)"
    assert "test_catalog.Base" in refused("catalog_none.py").why


def test_a_loop_of_ones_own_names_the_other_verb_and_is_not_run(folder: Path) -> None:
    text = "from pathlib import Path\nfor step in range(3):\n    Path('ran').touch()"
    write(folder / "catalog_loop.py", text)
    assert refused("catalog_loop.py").do.startswith(
        "allranks run --ranks 2 -- python catalog_loop.py, or"
    )
    assert not Path("ran").exists()


def test_a_syntax_error_names_file_and_line(folder: Path) -> None:
    write(folder / "catalog_syntax.py", "def broken(:\n    pass\n")
    found = refused("catalog_syntax.py").found
    assert found.startswith("SyntaxError: ") and "Traceback" not in found
    assert found.endswith(f"at line 3 of {folder / 'catalog_syntax.py'}")


@pytest.mark.parametrize("how", ["catalog_error.py", "../{name}/catalog_error.py"])
def test_an_error_while_loading_names_file_and_line(folder: Path, how: str) -> None:
    write(folder / "catalog_error.py", "x = 1\n\ny = x / 0\n")
    found = refused(how.format(name=folder.name)).found
    assert found.startswith("ZeroDivisionError: division by zero")
    assert found.endswith(f"at line 5 of {folder / 'catalog_error.py'}")


def test_a_file_that_ends_the_process_is_refused(folder: Path) -> None:
    """A script that calls `sys.exit(main())` without a guard must not end its rank unseen."""
    write(folder / "catalog_exit.py", "import sys\nclass Mine(Base): pass\nsys.exit(0)\n")
    assert "SystemExit" in refused("catalog_exit.py").found

"""The floors: who may import whom, what importing the command line pulls in,
a docstring in each."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib.metadata import metadata
from pathlib import Path
from typing import TypeGuard

import pytest

import house
from allranks.catalog import VERBS

TESTS = Path(__file__).parent
SOURCE, BENCHMARKS = TESTS.parent / "src" / "allranks", TESTS.parent / "benchmarks"

FLOORS = [
    {"", "alive", "errors", "catalog"},
    {"strategies", "checkpoint"},
    {"job"},
    {"launcher", "training"},
    {"torch", "tensorflow", "tools"},
    {"programs", "cli", "testing", "huggingface"},
]
LONGEST_FILE, LONGEST_FUNCTION = 600, 60
MOST_ROOMS, MOST_FILES_IN_A_ROOM = 16, 16
FRAMEWORKS = {"torch", "tensorflow", "jax", "numpy", "sklearn", "safetensors"}
PURE = {"", "alive", "errors", "catalog", "strategies", "job"}
PLAIN = set(sys.stdlib_module_names) | {"allranks"}
HAS_TORCH = {"torch", "programs", "testing", "huggingface"}
HAS_TENSORFLOW = {"tensorflow", "programs"}
MODULES = house.MODULES
MOST = {
    "files": 467,
    "lines": 109_650,
    "rooms in torch/": 19,
    "imports in a circle of rooms, torch/": 63,
    "imports in a circle of rooms, launcher/": 2,
    "imports in a circle of rooms, tools/": 0,
    "listed words as names": 205,
    "modules that `from allranks.torch import Task` loads": 36,
}


def part_of(module: str) -> str:
    """`allranks.torch.step.step` -> `torch`; of another package nothing."""
    root, *rest = [*module.split("."), ""]
    return rest[0] if root == "allranks" else ""


def floor_of(module: str) -> int:
    return next(i for i, parts in enumerate(FLOORS) if part_of(module) in parts)


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_for_types(node: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@cache
def imports_of(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at the top level of the file) of each import, relative ones refused.

    The block `if TYPE_CHECKING:` of a room that loads its names when they are asked for counts.
    """
    tree = ast.parse(path.read_text())
    for_types = [node for node in tree.body if _is_for_types(node)]
    top = {id(node) for node in (*tree.body, *(n for block in for_types for n in block.body))}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.module or "", id(node) in top))
    return found


def test_imports_point_down_and_stand_at_the_top() -> None:
    for path in MODULES:
        check_imports(path)


def check_imports(path: Path) -> None:
    name = name_of(path)
    for module, at_top in imports_of(path):
        assert at_top, f"{name} imports {module} inside a function"
        if module.startswith("allranks"):
            assert floor_of(module) <= floor_of(name), f"{name} imports {module}, above it"
        root = module.partition(".")[0]
        if part_of(name) in PURE:
            assert root in PLAIN, f"{name} knows the standard library only, and imports {module}"
        if root == "torch":
            assert part_of(name) in HAS_TORCH, f"{name} imports {module}"
        if root in ("tensorflow", "keras"):
            assert part_of(name) in HAS_TENSORFLOW, f"{name} imports {module}"
        engines = {"torch", "tensorflow"}
        if part_of(name) in engines:
            others = engines - {part_of(name)}
            assert part_of(module) not in others, f"{name} imports {module}: engines are apart"


def test_every_module_says_what_it_is_for() -> None:
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_the_package_names_its_licence_and_ships_its_types() -> None:
    about = metadata("allranks")
    assert about["License-Expression"] == "Apache-2.0"
    assert about.get_all("License-File") == ["LICENSE"]
    assert "Apache License" in (SOURCE.parents[1] / "LICENSE").read_text()
    assert (SOURCE / "py.typed").is_file(), "type checkers read no annotations without it"


def test_there_is_no_cycle_of_imports() -> None:
    edges = {
        name_of(path): {m for m, _ in imports_of(path) if m.startswith("allranks")}
        for path in MODULES
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for imported in edges.get(module, ()):
                visit(imported, (*above, module))
            done.add(module)

    for module in edges:
        visit(module, ())


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("verb", ["", *(verb for verb in VERBS if verb != "check")])
def test_the_command_line_imports_no_framework(verb: str) -> None:
    """In a fresh interpreter: help, of all verbs and of each, needs no framework and no numpy."""
    code = (
        "import sys\nfrom allranks.cli.main import cli\n"
        f"cli({[verb, '--help'] if verb else ['--help']!r}, standalone_mode=False)\n"
        f"found = {FRAMEWORKS!r} & {{m.partition('.')[0] for m in sys.modules}}\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_checker_needs_no_framework_but_numpy() -> None:
    code = "import sys, allranks.cli.check\nassert not {'torch', 'tensorflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_asked_for_is_taken_apart_in_one_file_each() -> None:
    """A strategy, the dial, the options of a card, a place, a loss scale, an optimizer by name."""
    readers = {
        p.relative_to(SOURCE).as_posix() for p in MODULES if "parse_choice(" in p.read_text()
    }
    assert readers == {
        "job/loss_scale.py",
        "job/place.py",
        "job/recipes.py",
        "strategies/card.py",
        "strategies/choice.py",
        "strategies/auto.py",
        "strategies/resolve.py",
    }


def test_files_and_functions_stay_short() -> None:
    for path in MODULES:
        text = path.read_text()
        assert text.count("\n") <= LONGEST_FILE, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                assert length <= LONGEST_FUNCTION, f"{path}:{node.lineno} {node.name}"


def test_the_house_has_few_rooms_and_none_is_crowded() -> None:
    top = {name for name in (part_of(name_of(path)) for path in MODULES) if name}
    assert len(top) <= MOST_ROOMS, sorted(top)
    rooms = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    crowded = {str(room): count for room, count in rooms.items() if count > MOST_FILES_IN_A_ROOM}
    assert not crowded, crowded


def test_each_class_has_a_name_of_its_own() -> None:
    """`Task` and `Trainer` are what a user imports, from the engine that trains."""
    shared = {name for name, times in house.classes().items() if times > 1}
    assert shared == {"Task", "Trainer"}


def test_the_house_does_not_grow_back() -> None:
    """Lower these with what a change removes; raise none of them without a reason in the commit."""
    figures = house.figures()
    assert {name: figures[name] for name, most in MOST.items() if figures[name] > most} == {}


@pytest.mark.slow
def test_a_step_a_save_and_a_launch_run_through_few_files() -> None:
    """What a reader has to open: see CONTRIBUTING.md. A step of `ddp` ran through 43 once."""
    found = house.trips()
    most = {
        **{"a step of ddp": 20, "a step of zero2": 30, "a step of fsdp": 32, "a step of gpipe": 30},
        **{"a save": 20, "a launch of two ranks": 37},
    }
    over = {name: found["lists"][name] for name in most if len(found["lists"][name]) > most[name]}
    assert over == {}


def test_one_module_names_accelerators() -> None:
    """The others ask `allranks.torch.accelerator`."""
    named = re.compile(r"torch\.(cuda|xpu)\b|\.is_(cuda|xpu)\b|\"(cuda|xpu)\"")
    may = {"accelerator.py"}
    modules = (SOURCE / "torch").rglob("*.py")
    found = {path.name for path in modules if named.search(path.read_text())}
    assert found <= may, found - may
    assert "accelerator.py" in found


def test_each_file_of_tests_has_a_name_of_its_own() -> None:
    """Pytest imports them by name, so two of one name are an error in a run that takes both."""
    tests = Path(__file__).parent
    names = Counter(
        path.name for path in tests.rglob("test_*.py") if "cluster" not in path.parts
    )  # the cluster's are a run of their own
    assert [name for name, times in names.items() if times > 1] == []


def test_what_benchmarks_import_is_there() -> None:
    """They are run by hand, days apart: a module that has moved would not be missed before."""
    elsewhere = {"PIL", "accelerate", "deepspeed", "keras", "lightning_fabric", "mpi4py", "numpy"}
    elsewhere |= {"transformers"}
    known = PLAIN | FRAMEWORKS | elsewhere
    known |= {path.stem for room in (BENCHMARKS, TESTS) for path in room.rglob("*.py")}
    missing = []
    for path in sorted(BENCHMARKS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                wanted = [(node.module, alias.name) for alias in node.names]
            else:
                continue
            missing += [
                (path.name, module, name)
                for module, name in wanted
                if module.partition(".")[0] not in known
                or (part_of(module) and not _is_ours(module, name))
            ]
    assert not missing


def _is_ours(module: str, name: str) -> bool:
    """Whether the package has this module, and in it the name, if one is given."""
    path = _file_of(module)
    if path is None or not name or _file_of(f"{module}.{name}") is not None:
        return path is not None
    return any(name in _names_of(node) for node in ast.parse(path.read_text()).body)


def _file_of(module: str) -> Path | None:
    """The file of a module of ours, or of the room that it is."""
    path = SOURCE.parent.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((one for one in found if one.is_file()), None)


def _names_of(node: ast.stmt) -> set[str]:
    """The names in a statement at the top level of a file; not those inside of what it defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if _is_for_types(node):
        return set[str]().union(*map(_names_of, node.body))
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}

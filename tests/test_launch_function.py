"""`allranks.launch`: from a script or a notebook to a result, an error that says why,
and nothing left."""

from __future__ import annotations

import linecache
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import allranks
from allranks.cli.notebook.cells import program_for
from allranks.cli.notebook.program import _written, fields_of, module_file, prepare_program
from allranks.errors import ProgramError, RequestError
from allranks.job.run_folder import read_events
from allranks.launcher import start
from allranks.launcher.processes import leftovers
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.signals import Signals
from conftest import Train
from launch_host import until
from resume_tasks import Rates


@pytest.fixture
def warm(server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder to launch from; ranks are forked from the server of all tests."""
    monkeypatch.setattr(start, "ForkServer", lambda modules: nullcontext(server))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- a job --------------------------------------------------------------------------------------


def test_an_instance_trains_with_its_fields(warm: Path, train: Train) -> None:
    trained = allranks.launch(Rates(lr=0.02, hidden=4), ranks=2, steps=4, run_dir=warm / "run")
    same = train("resume_tasks:Rates", "lr=0.02", "hidden=4", ranks=2, steps=4)
    assert trained.summary["weights_sha256"] == same.summary["weights_sha256"]
    assert trained.run_dir == warm / "run" and "run folder" in repr(trained)
    assert trained.weights()["0.weight"].shape == (4, 4)
    recorded = (warm / "run" / "job.toml").read_text()
    assert 'ranks = "launch()"' in recorded and '"task.lr" = "launch()"' in recorded


def test_options_are_those_of_train(warm: Path) -> None:
    """Passes over the data are said as on the command line, and a number may stand for a text."""
    trained = allranks.launch(Rates, epochs=2, eval_every=5, run_dir="run")
    assert trained.summary["steps"] == 10
    recorded = (warm / "run" / "job.toml").read_text()
    assert "epochs = 2" in recorded and 'eval_every = "5"' in recorded
    assert any(e["event"] == "evaluated" for e in read_events(warm / "run"))
    with pytest.raises(RequestError, match="two things about one end"):
        allranks.launch(Rates, epochs=2, steps=5)
    with pytest.raises(RequestError, match="did you mean 'epochs'"):
        allranks.launch(Rates, epoch=2)
    with pytest.raises(RequestError, match="no option 'lr'") as error:
        allranks.launch(Rates, lr=0.1)
    assert "settings" in error.value.why


def test_a_name_with_settings_trains_in_a_thread(warm: Path) -> None:
    """Beside the main thread no signal is touched."""
    found: list[Any] = []
    before = [signal.getsignal(number) for number in Signals.STOP]

    def run() -> None:
        found.append(allranks.launch("resume_tasks:Rates", settings={"hidden": 3}, steps=2))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[0].weights()["0.weight"].shape == (3, 4)
    assert found[0].run_dir.parent == warm / "runs"
    assert [signal.getsignal(number) for number in Signals.STOP] == before


def test_a_program_that_fails_raises_its_first_fault(warm: Path) -> None:
    with pytest.raises(ProgramError, match="is nan"):
        allranks.launch(Rates(lr=math.nan), steps=4)


def test_ctrl_c_is_a_keyboard_interrupt_with_a_checkpoint(warm: Path) -> None:
    run = warm / "run"

    def press() -> None:
        until(lambda: any(e["event"] == "training" for e in read_events(run)), "the training")
        os.kill(os.getpid(), signal.SIGINT)

    hand = threading.Thread(target=press)
    hand.start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="which is committed; resume with"):
        allranks.launch(
            Rates, ranks=2, steps=400, run_dir="run", inject="slow@seconds=0.05,attempt=-1"
        )
    hand.join()
    assert signal.getsignal(signal.SIGINT) == before
    assert list((run / "checkpoints").glob("step-*"))


# --- what is refused ----------------------------------------------------------------------------


def test_an_unknown_option_names_the_nearest(warm: Path) -> None:
    with pytest.raises(RequestError) as error:
        allranks.launch(Rates, rank=2)
    assert error.value.do.startswith("did you mean 'ranks'?")
    with pytest.raises(RequestError, match="ranks takes int"):
        allranks.launch(Rates, ranks="two")
    with pytest.raises(RequestError, match="no strategy"):
        allranks.launch(Rates, strategy="magic")
    assert not any(warm.iterdir())


def test_what_is_no_task_is_refused(warm: Path) -> None:
    with pytest.raises(RequestError, match="a task is a class derived from"):
        allranks.launch(3)


def test_a_rank_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(leftovers.VARIABLE, f"{leftovers.owner()}/1")
    with pytest.raises(RequestError) as error:
        allranks.launch(Rates)
    assert "__main__" in error.value.do


SCRIPT = """
import allranks
from resume_tasks import Rates

class Mine(Rates):
    pass

allranks.launch(Mine, steps=2)
"""


def test_a_file_that_launches_when_it_is_imported_says_so(warm: Path) -> None:
    """The rank that reads the task imports the file, and with it the call."""
    (warm / "forgot.py").write_text(SCRIPT)
    with pytest.raises(RequestError) as error:
        allranks.launch("forgot.py:Mine", steps=2)
    assert "to launch Mine" in error.value.asked and "__main__" in error.value.do


def test_a_script_names_itself_by_its_file(tmp_path: Path) -> None:
    """In a process of its own, as far as the program; and `import allranks` brings nothing else."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys\nimport allranks\n"
        "assert not {'torch', 'click', 'allranks.catalog'} & set(sys.modules)\n"
        "import dataclasses\nfrom pathlib import Path\n"
        "from allranks.cli.notebook.program import prepare_program\n"
        "@dataclasses.dataclass\nclass Mine:\n    lr: float = 0.1\n"
        "print(*prepare_program(Mine(lr=0.5), Path('runs')), callable(allranks.launch))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "mine.py:Mine {'lr': 0.5} True\n", done.stderr


# --- where a class is, and what its instance says -----------------------------------------------


@dataclass
class Fields:
    """Stands for a task where only its fields matter."""

    lr: float = 0.1
    name: str | None = None
    layers: Any = ()

    @cached_property
    def data(self) -> int:
        return 3


@dataclass
class Changes:
    """Works on a field when it is made."""

    lr: float = 0.1

    def __post_init__(self) -> None:
        self.lr = 2 * self.lr


def test_fields_that_are_at_their_defaults_are_not_said() -> None:
    assert fields_of(Fields()) == {}
    task = Fields(lr=0.5, name="x")
    assert task.data == 3 and fields_of(task) == {"lr": 0.5, "name": "x"}
    assert fields_of(Fields(name=None, lr=math.nan)).keys() == {"lr"}


def test_an_instance_that_cannot_be_made_again_is_refused() -> None:
    task = Fields()
    task.more = 1  # type: ignore[attr-defined]
    for wrong, found in [
        (task, "more = 1, which is no field"),
        (Changes(lr=0.5), "lr = 1.0, which its __post_init__ changes"),
        (Fields(layers=[1]), "a list"),
        (Fields(lr=np.float32(0.5)), "a float32"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(RequestError) as error:
            fields_of(wrong)
        assert error.value.found == found


def test_a_class_is_named_by_where_it_is() -> None:
    assert module_file(Rates, Path("runs")).endswith("resume_tasks.py:Rates")
    digits = sys.modules.get("allranks.programs.synthetic") or __import__(
        "allranks.programs.synthetic", fromlist=["Synthetic"]
    )
    assert module_file(digits.Synthetic, Path("runs")) == "synthetic"
    assert prepare_program(Path("my/task.py"), Path("runs")) == ("my/task.py", {})

    @dataclass
    class Inner:
        pass

    with pytest.raises(RequestError, match="is not this class"):
        module_file(Inner, Path("runs"))


# --- the program file of a notebook -------------------------------------------------------------


def program_text(name: str, cells: Sequence[str], namespace: dict[str, Any]) -> str:
    """The text of a program that needs no file of values."""
    program = program_for(name, cells, namespace)
    assert not program.values.tensors and not program.values.arrays
    return program.text(())


def run_cells(monkeypatch: pytest.MonkeyPatch, *cells: str) -> dict[str, Any]:
    """Run cells as a notebook does: in `__main__`, all in one namespace; one may fail."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for number, cell in enumerate(cells):
        file = f"<cell {number}>"
        entry = (len(cell), None, cell.splitlines(keepends=True), file)
        monkeypatch.setitem(linecache.cache, file, entry)
        with suppress(ZeroDivisionError):
            exec(compile(cell, file, "exec", dont_inherit=True), vars(main))
    return vars(main)


IMPORTS = "import math, json\nfrom dataclasses import dataclass\nfrom os.path import *"
NET = """\
@dataclass
class Net(Base):  # the last definition
    width: int = WIDTH

    def area(self):
        return scaled(self.width) * FACTORS["pi"] + len(basename("a/b")) + table[1]
"""
CELLS = (
    IMPORTS,
    "class Base:\n    pass",
    "class Net(Base):\n    old = True",
    "WIDTH = int('3'); FACTORS = {'pi': math.pi}\nprint('nothing of this is kept')",
    "# kept whole\nfrom math import pi as e\nTIMES: int = 1\n\ndef scaled(x):\n    return x * "
    "unit()\n\nunit = lambda: WIDTH * TIMES",
    "big = [object() for _ in range(9)]",
    "table, rest = dict([(1, 2)]), object()",
    NET,
)


def test_the_program_of_cells_defines_the_same_class(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = run_cells(monkeypatch, *CELLS)
    text = program_text("Net", CELLS, namespace)
    assert "# the last definition" in text and "old = True" not in text
    assert CELLS[4] in text
    assert not [word for word in ("print", "big", "json") if word in text]
    assert "WIDTH = 3\n" in text and "from posixpath import basename\n" in text
    again: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program.py", "exec", dont_inherit=True), again)
    assert again["Net"]().area() == namespace["Net"]().area() == 9 * math.pi + 3


def test_a_cell_that_failed_defines_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = (
        "class Net:\n    def f(self): return 1",
        "1 / 0\nclass Net:\n    def f(self): return 2",
    )
    text = program_text("Net", cells, run_cells(monkeypatch, *cells))
    assert "return 1" in text and "return 2" not in text


def test_a_cell_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would do again, or undo, or cannot be put in the midst of a file, is refused."""
    again = ("def f(): return g()\ndef g(): return 1",)
    for cells, found in [
        (("def f(): pass\nf()",), "f needs its whole cell, which also runs: f()"),
        (
            ("from __future__ import annotations\ndef f(): pass",),
            "which also runs: from __future__",
        ),
        (("from math import *\ndef f(): pass",), "which also runs: from math import *"),
        (("n = 1\ndef f(): return n", "n = 2"), "'n' is another by now"),
        (("import math\ndef f(): return math", "import json as math"), "'math' is another by now"),
        ((*again, "def g(): return 2"), "'g' is another by now"),
        ((*again, "def g(): return 1\n"), "'g' is another by now"),
        ((*again, "g = 3"), "'g' is another by now"),
        ((*again, "g.a = 3"), "'g', which is changed by a statement: g.a = 3"),
        (
            ("class B: 0", "def deco(c): return c\nclass f(B): 0", "@deco\nclass B: 1"),
            "B needs 'deco', of a cell that needs 'B' before",
        ),
    ]:
        with pytest.raises(RequestError) as error:
            program_text("f", cells, run_cells(monkeypatch, *cells))
        assert found in error.value.found, error.value.found
        assert "%%writefile mytask.py" in error.value.do


def test_a_cell_that_was_run_again_stands_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "def f(): return g()\ndef g(): return 1"
    namespace = run_cells(monkeypatch, cell, "g()", cell)
    assert program_text("f", (cell, "g()", cell), namespace).count("def f") == 1


def test_a_name_that_only_the_notebook_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for cells, found in [
        (("def f(): return missing",), "f needs the name 'missing', which nothing in the"),
        (("def x(): pass\nx.a = 1", "def f(): return x"), "'x', which is changed by a statement"),
        (("x = [1, object()]", "def f(): return x"), "f needs 'x[1]', a builtins.object"),
        (("import io\nx = io.StringIO()", "def f(): return x"), "f needs 'x', a _io.StringIO"),
        (("x = [lambda: 1][0]", "def f(): return x"), "'x' (function), which no cell defines"),
        (("x = []\nx.append(x)", "def f(): return x"), "'x', which holds itself"),
        (("def f(): return display(1)",), "f needs the name 'display'"),
        (("token = 'hf_abcdefghijkl'", "def f(): return token"), "looks like a secret"),
        (("c = {'api_key': 'abc'}", "def f(): return c"), "\"c['api_key']\", which looks like a"),
        (("x = list(range(300_000))", "def f(): return x"), "'x', of 2,288,890 characters"),
        (("class f: x = object()",), "f needs 'f.x', a builtins.object"),
        (("class A:\n  def g(s): pass\nA.h = 1", "def f(): return A"), "a statement: A.h = 1"),
    ]:
        with pytest.raises(RequestError) as error:
            program_text("f", cells, run_cells(monkeypatch, *cells))
        assert found in error.value.found, error.value.found


def test_what_calls_each_other_is_in_an_order_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = (
        "from __future__ import annotations",
        "def even(n): return n == 0 or odd(n - 1)",
        "def odd(n): return n != 0 and even(n - 1)",
        "def marked(c):\n    c.mark = even(MANY)\n    return c",
        "MANY = 4",
        "@marked\nclass A:\n    def b(self): return B",
        "class B(A): pass",
    )
    for name in ("A", "B"):
        text = program_text(name, cells, run_cells(monkeypatch, *cells))
        again: dict[str, Any] = {"__name__": "program"}
        exec(compile(text, "program.py", "exec", dont_inherit=True), again)
        assert again["A"].mark and again["A"]().b() is again["B"]
        assert text.index("from __future__") < text.index("MANY")


DRAWN = (
    "import random\nimport numpy as np\nimport torch\nfrom dataclasses import dataclass, field\n"
    "from pathlib import Path\nfrom torch.utils.data import TensorDataset, random_split",
    "torch.manual_seed(42); X = torch.randn(6, 2, dtype=torch.bfloat16)\ny = X.sum(1)\nX *= 2",
    "np.random.seed(1)\norder = np.random.permutation(6)\nlow, high = np.split(order, 2)\n"
    "mean = np.float32(high.mean())",
    "part, rest = random_split(TensorDataset(X, y), [4, 2])\nX[0] = 7",
    "@dataclass\nclass Config:\n    rate: float\n    sizes: list = field(default_factory=list)",
    "config = Config(random.random())\nconfig.sizes.append(np.arange(3.0))",
    "device, dtype, where = torch.device('cpu'), torch.float64, Path('a') / 'b'\n"
    "table = {('a', 1): (float('inf'), {3}, b'b', None), 'b': [1j, (True,), frozenset()]}",
    "def everything():\n    return [X, y, low, mean, part[0], part[3], config, device, dtype, "
    "where, table]",
    "same = everything",
    "def all_of(): return same()",
)


def test_what_was_drawn_or_changed_travels_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is drawn again: not a tensor, an array, a split, or a field of a dataclass."""
    namespace = run_cells(monkeypatch, *DRAWN)
    place = _written(program_for("all_of", DRAWN, namespace), tmp_path)
    path = Path(place.removesuffix(":all_of"))
    assert place == _written(program_for("all_of", DRAWN, namespace), tmp_path)
    assert len(list(path.parent.iterdir())) == 3  # the program, tensors, arrays
    text = path.read_text()
    assert not [
        word for word in ("randn", "seed", "random", "split", "permutation") if word in text
    ]
    torch.manual_seed(0)
    here, there = run_file(path)["all_of"](), namespace["all_of"]()
    for one, other in zip(here, there, strict=True):
        if type(one).__name__ == "Config":
            assert one.rate == other.rate and np.array_equal(one.sizes[0], other.sizes[0])
        elif isinstance(one, torch.Tensor | np.ndarray):
            assert one.dtype == other.dtype and (one == other).all()
        elif isinstance(one, tuple):
            assert all(map(torch.equal, one, other))
        else:
            assert type(one) is type(other) and one == other, (one, other)


def run_file(path: Path) -> dict[str, Any]:
    """What a rank has that imports it."""
    made: dict[str, Any] = {"__name__": "program", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), made)
    return made


def test_what_a_definition_draws_is_refused_on_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells = (
        "import random",
        "class Net:\n    layers = int('3')\n    rate = random.random()",
        "def f(a, b=random.random()): return Net, b",
    )
    for name in ("Net", "f"):
        place = _written(program_for(name, cells, run_cells(monkeypatch, *cells)), tmp_path)
        with pytest.raises(RequestError, match="every rank made another one"):
            run_file(Path(place.removesuffix(f":{name}")))
    tensor = ("import torch", "x = torch.ones(2, requires_grad=True)", "def f(): return x")
    with pytest.raises(RequestError, match="requires a gradient") as error:
        program_for("f", tensor, run_cells(monkeypatch, *tensor))
    assert "%%writefile mytask.py" in error.value.do

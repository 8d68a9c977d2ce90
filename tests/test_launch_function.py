"""`allranks.launch`: from a script or a notebook to a result, an error that says why,
and nothing left."""

from __future__ import annotations

import hashlib
import linecache
import math
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import allranks
from allranks.cli import api, by_value
from allranks.cli.api import fields_of, place_of, prepare_program
from allranks.cli.by_value import write_class
from allranks.cli.main import cli
from allranks.errors import ProgramError, RequestError
from allranks.job.job import with_settings
from allranks.job.run_folder import read_events
from allranks.launcher import start
from allranks.launcher.processes import leftovers
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.supervisor import Signals
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_script_names_itself_by_its_file(tmp_path: Path) -> None:
    """In a process of its own, as far as the program; and `import allranks` brings nothing else."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys\nimport allranks\n"
        "assert not {'torch', 'click', 'allranks.catalog'} & set(sys.modules)\n"
        "import dataclasses\nfrom pathlib import Path\n"
        "from allranks.cli.api import prepare_program\n"
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
    assert place_of(Rates, Path("runs")).endswith("resume_tasks.py:Rates")
    digits = sys.modules.get("allranks.programs.synthetic") or __import__(
        "allranks.programs.synthetic", fromlist=["Synthetic"]
    )
    assert place_of(digits.Synthetic, Path("runs")) == "synthetic"
    assert prepare_program(Path("my/task.py"), Path("runs")) == ("my/task.py", {})

    @dataclass
    class Inner:
        pass

    with pytest.raises(RequestError, match="is not this class"):
        place_of(Inner, Path("runs"))


# --- a class of a notebook -----------------------------------------------------------------------


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


def carry(name: str, namespace: dict[str, Any], folder: Path) -> ModuleType:
    """The module that ranks import, with the class of the notebook."""
    path = write_class(namespace[name], namespace, folder)
    module = ModuleType(f"program_{len(list(folder.iterdir()))}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), vars(module))
    return module


@pytest.fixture(autouse=True)
def same_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


DEFINED = (
    "from __future__ import annotations\nimport math, threading\nfrom dataclasses import *\n"
    "from os.path import basename\nfrom typing import Literal\nlock = threading.Lock()",
    "class Base:\n    pass",
    "class Net(Base):\n    old = True",
    "WIDTH = int('3'); FACTORS = {'pi': math.pi}",
    "def scaled(x):\n    return x * unit()\n\nunit = lambda: WIDTH\nnamed = lambda: __name__",
    "1 / 0\nclass Net: old = True",
    "from __future__ import annotations\n@dataclass(kw_only=True)\nclass Net(Base):\n"
    "    rate: float\n    width: int = WIDTH\n    mode: Literal['a', 'b'] = 'a'\n"
    "    sizes: list = field(default_factory=list)\n\n    def area(self):\n"
    "        return scaled(self.width) * FACTORS['pi'] + len(basename('a/b'))\n\n"
    "    def again(self):\n        return Net, Base, named()",
    "Net.more = 7; scaled.mark = 8; WIDTH = 4",
)


def test_a_class_is_carried_as_the_notebook_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last definition, with what was set on it since; and a class like one of a module."""
    namespace = run_cells(monkeypatch, *DEFINED)
    module = carry("Net", namespace, tmp_path)
    net = module.Net
    assert net is not namespace["Net"] and net.__module__ == module.__name__ != "__main__"
    assert net(rate=1).area() == namespace["Net"](rate=1).area() == 12 * math.pi + 1
    assert (net.more, module.scaled.mark, hasattr(net, "old")) == (7, 8, False)
    assert net(rate=1).again() == (net, module.Base, module.__name__)
    assert module.scaled.__module__ == net.area.__module__ == module.__name__
    assert with_settings(net, {"rate": "2", "mode": "b"}, "").mode == "b"
    with pytest.raises(RequestError, match="no value for rate"):
        with_settings(net, {}, "")
    with pytest.raises(RequestError, match="mode takes"):
        with_settings(net, {"rate": "2", "mode": "c"}, "")
    assert net(rate=1).sizes is not net(rate=1).sizes
    names = vars(module).keys() & namespace.keys()
    assert "lock" not in names and "math" not in names, "more than the class uses"
    cell = module.scaled.__code__.co_filename
    assert re.fullmatch(r"cell-\d\.py", cell) and "return x * unit()" in linecache.getline(cell, 2)
    assert net.__init__.__code__.co_filename == "<string>", "a dataclass's own"


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
    "class Task:\n    drawn = random.random()\n    def all_of(self, late=random.random()):\n"
    "        return [*same(), self.drawn, late]",
)


def test_what_was_drawn_or_changed_travels_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is drawn again: not a tensor, an array, a split, a field, or a default."""
    namespace = run_cells(monkeypatch, *DRAWN)
    module = carry("Task", namespace, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # the program, and the pickle
    here, there = module.Task().all_of(), namespace["Task"]().all_of()
    for one, other in zip(here, there, strict=True):
        if type(one).__name__ == "Config":
            assert one.rate == other.rate and np.array_equal(one.sizes[0], other.sizes[0])
            assert type(one).__module__ == module.__name__
        elif isinstance(one, torch.Tensor | np.ndarray):
            assert one.dtype == other.dtype and (one == other).all()
        elif isinstance(one, tuple):
            assert all(map(torch.equal, one, other))
        else:
            assert type(one) is type(other) and one == other, (one, other)


class OnDevice(torch.Tensor):
    """Stands for a tensor in the memory of a device."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]


def test_what_no_other_process_can_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the name that the notebook has for it, and before anything is written."""
    imports = "import io, threading, sqlite3, torch\nfrom test_launch_function import OnDevice"
    for cell, found in [
        (f"x = f = open({__file__!r})", "A uses 'x': an open file, '"),
        (f"f = open({__file__!r}, 'rb')\nx = [1, f]", "A uses 'x[1]': an open file, '"),
        (
            "x = {'a': threading.Lock()}",
            "A uses \"x['a']\": TypeError: cannot pickle '_thread.lock'",
        ),
        ("x = (i for i in [1])", "A uses 'x': TypeError: cannot pickle 'generator'"),
        ("x = sqlite3.connect(':memory:')", "A uses 'x': TypeError: cannot pickle 'sqlite3.Conn"),
        ("x = torch.ones(2).as_subclass(OnDevice)", "A uses 'x': a tensor on cuda:1"),
        ("class x: pass\nx = x(); x.at = threading.Lock()", "A uses 'x.at': TypeError: cannot"),
        ("def outer(y):\n  return lambda: y\nx = outer(threading.Lock())", "A uses 'y': TypeErr"),
        ("x = 'hf_abcdefghijkl'", "A uses 'x': a text that looks like a secret"),
        ("x = {'api_key': 'abc'}", "A uses \"x['api_key']\": a text that looks like a secret"),
    ]:
        namespace = run_cells(monkeypatch, imports, cell, "class A:\n  def f(self): return x")
        with pytest.raises(RequestError) as error:
            write_class(namespace["A"], namespace, tmp_path / "programs")
        assert error.value.found.startswith(found), error.value.found
        assert error.value.asked == "to launch A from a notebook"
        assert "%%writefile mytask.py" in error.value.do
        if "f" in namespace:
            namespace["f"].close()
    assert not list(tmp_path.iterdir())


def test_another_python_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    namespace = run_cells(monkeypatch, "class A: pass")
    path = write_class(namespace["A"], namespace, tmp_path)
    text = path.read_text().replace(f"{by_value.PYTHON!r})", "'2.7')")
    with pytest.raises(RequestError, match="a notebook of Python 2"):
        exec(text, {"__file__": str(path), "__name__": "program"})


def test_a_pickle_that_is_not_the_program_s_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor one that another user may have put there; a mask that shares files does not matter."""
    folder = tmp_path / "programs"
    namespace = run_cells(monkeypatch, "class A: pass")
    before = os.umask(0o002)
    try:
        path = write_class(namespace["A"], namespace, folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}

    def load() -> None:
        exec(path.read_text(), {"__file__": str(path), "__name__": "program"})

    load()
    content = path.with_suffix(".pickle").read_bytes()
    monkeypatch.setattr(by_value, "_ran", [], raising=False)
    code = "from allranks.cli import by_value; by_value._ran.append(1)"
    path.with_suffix(".pickle").write_bytes(pickle.dumps(_Runs(code)))
    with pytest.raises(RequestError, match="a content of SHA-256") as error:
        load()
    assert hashlib.sha256(content).hexdigest() in error.value.found
    assert "launch the class again" in error.value.do and not vars(by_value)["_ran"]
    path.with_suffix(".pickle").write_bytes(content)

    for place, mode in [
        (folder, 0o770),
        (folder, 0o702),
        (path.with_suffix(".pickle"), 0o620),
        (path, 0o602),
    ]:
        private = stat.S_IMODE(place.stat().st_mode)
        place.chmod(mode)
        changed = place.stat().st_mtime_ns
        for use in (load, lambda: write_class(namespace["A"], namespace, folder)):
            with pytest.raises(RequestError, match="other users may write it") as error:
                use()
            assert error.value.do == f"chmod go-w {place}"
        assert place.stat().st_mtime_ns == changed
        place.chmod(private)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    for use in (load, lambda: write_class(namespace["A"], namespace, folder)):
        with pytest.raises(RequestError, match="it belongs to another user"):
            use()


class _Runs:
    """Its pickle runs this text when it is read."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.text,)


KERNEL = """
import hashlib, linecache, os, sys
from pathlib import Path
from types import SimpleNamespace
import allranks
from allranks.cli import api

def run(cell, count):
    file = f"/tmp/ipykernel_{os.getpid()}/{count}-{hashlib.sha256(cell.encode()).hexdigest()}.py"
    linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
    exec(compile(cell, file, "exec", dont_inherit=True), globals())

shell = SimpleNamespace(user_ns=globals())
api.shell = lambda: shell
for again in range(2):
    for number, cell in enumerate(CELLS):
        run(cell, again * len(CELLS) + number)
    print(api.prepare_program(Mine, Path("."))[0])
for steps in sys.argv[1:]:
    trained = allranks.launch(Mine, steps=int(steps), run_dir="run", checkpoint_every=1)
    print(trained.summary["steps"])
"""
OF_A_KERNEL = (
    "import torch\nfrom dataclasses import dataclass\nfrom enum import Enum\n"
    "from typing import Generic, TypeVar\nfrom resume_tasks import Rates\n"
    "torch.manual_seed(3); start = torch.randn(4, 4); half = start.bfloat16()[1:]",
    "T = TypeVar('T')\nclass Kind(Enum):\n    A = 'a'\n    B = 'b'\n"
    "class Box(Generic[T]):\n    names = {'d', 'e', 'f', None, 1}",
    "same = Box.names\nboxes = {Kind.A: Box(), 'b': frozenset({'g', 'h', 'i'})}\n"
    "def known(x: 'T'):\n    return x in {'a', 'b', 'c', None} and boxes and same is Box.names",
    "@dataclass(kw_only=True)\nclass Mine(Rates):\n    hidden: int = 4\n"
    "    def model(self):\n        assert known(Kind('a').value) and T and half.shape == (3, 4)\n"
    "        model = super().model()\n        model[0].weight.data.copy_(start)\n"
    "        return model",
)


def printed_by_kernel(folder: Path, hash_seed: str, *steps: str) -> list[str]:
    (folder / "kernel.py").write_text(f"CELLS = {OF_A_KERNEL!r}\n{KERNEL}")
    done = subprocess.run(
        [sys.executable, "kernel.py", *steps],
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_equal_cells_are_an_equal_program_and_a_kernel_that_was_started_again_resumes(
    tmp_path: Path,
) -> None:
    """Equal in another process, and when they are run again."""
    *names, steps = printed_by_kernel(tmp_path, "1", "2")
    *others, more = printed_by_kernel(tmp_path, "2", "4")
    assert len(names + others) == 4 and len({*names, *others}) == 1, names + others
    programs = [path for path in (tmp_path / "programs").iterdir() if path.is_file()]
    assert len(programs) == 2  # the program, and the pickle
    assert (steps, more) == ("2", "4")


TRAINED = (
    "from dataclasses import dataclass\nimport torch\nfrom resume_tasks import Rates\n"
    "import beside_the_notebook\ntorch.manual_seed(3); start = torch.randn(4, 4)",
    "@dataclass(kw_only=True)\nclass Mine(Rates):\n    hidden: int = 4\n    wrong: bool = False\n\n"
    "    def model(self):\n        model = super().model()\n"
    "        model[0].weight.data.copy_(start * beside_the_notebook.FACTOR)\n"
    "        return model\n\n    def loss(self, output, batch):\n"
    "        if self.wrong:\n            raise ValueError('of the notebook')\n"
    "        return super().loss(output, batch)",
)


@pytest.mark.slow
def test_a_class_of_a_notebook_trains_restarts_and_resumes(
    warm: Path, monkeypatch: pytest.MonkeyPatch, train: Train, same_paths: None
) -> None:
    """With a module beside the notebook; a fault in a cell is reported with its line."""
    (warm / "lib").mkdir()
    (warm / "lib" / "beside_the_notebook.py").write_text("FACTOR = 2\n")
    sys.path.append(str(warm / "lib"))
    namespace = run_cells(monkeypatch, *TRAINED)
    shell = SimpleNamespace(user_ns=namespace)
    monkeypatch.setattr(api, "shell", lambda: shell)
    mine = namespace["Mine"]
    whole = allranks.launch(mine(lr=0.02), ranks=2, steps=6, run_dir="whole", checkpoint_every=6)
    died = allranks.launch(
        mine(lr=0.02),
        ranks=2,
        steps=6,
        run_dir="died",
        checkpoint_every=2,
        max_restarts=1,
        inject="exit@rank=1,step=4",
    )
    assert died.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert died.summary["restarts"] == 1
    resume = ("--resume", "whole", "--run-dir", "longer", "--steps", "8")
    cli(["train", *resume], standalone_mode=False)
    assert (warm / "longer" / "weights.safetensors").is_file()
    with pytest.raises(ProgramError, match="of the notebook") as error:
        allranks.launch(mine(wrong=True), steps=2)
    assert "raise ValueError('of the notebook')" in str(error.value)

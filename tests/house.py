"""How hard is the code to follow? Figures of src/allranks, and of the trips that a reader follows.

    python tests/house.py            what the text says: seconds
    python tests/house.py --trips    also the files that a step, a save and a launch run through

A trip is counted with a profile function in the thread that makes it: files of this package, and
calls into them. A step is the third one of a strategy on two ranks, on rank 0; the save follows
under `ddp`. The launch is `allranks train digits --ranks 2` in the process of the command, from its
words to its end. `--list` names the files of each trip.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).resolve().parents[1] / "src" / "allranks"
MODULES = sorted(SOURCE.rglob("*.py"))
ROOMS = ("torch", "launcher", "tools")

WORDS = (
    *("taken", "said", "heard", "told", "given", "found", "held", "kept", "asked", "brought"),
    *("left", "rest", "beside", "apart", "later", "together", "own", "one", "what", "who"),
    *("seen", "made", "sent", "turned"),
)
"""Names that say nothing of what they hold. `asked` and `found` stay as the parts of an error."""

PARTS_OF_AN_ERROR = {"asked", "found"}


# --- what the text says ----------------------------------------------------------------------


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


class Facts(NamedTuple):
    """What the figures need of a file, from one look at its syntax tree.

    `imports` are modules of ours as dotted names; of a name in a module, the name and the module.
    """

    imports: set[str]
    classes: list[str]
    names: Counter[str]


@cache
def facts(path: Path) -> Facts:
    found = Facts(set(), [], Counter())
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("allranks"):
            found.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.imports.add(str(node.module))
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names)
            found.imports.update(name for name in names if name.startswith("allranks"))
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.names[node.id if isinstance(node, ast.Name) else node.attr] += 1
        elif isinstance(node, ast.arg):
            found.names[node.arg] += 1
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.names[node.name.lower()] += 1
            if isinstance(node, ast.ClassDef):
                found.classes.append(node.name)
    return found


def room_of(module: str, top: str) -> str | None:
    """The room of a module below `allranks.TOP`; "" for a file that lies in no room."""
    parts = module.split(".")
    if parts[:2] != ["allranks", top]:
        return None
    is_in_a_room = len(parts) > 3 or (len(parts) == 3 and (SOURCE / top / parts[2]).is_dir())
    return parts[2] if is_in_a_room else ""


def rooms(top: str) -> dict[str, set[str]]:
    """Each room of a part of the house, and the rooms that it imports; loose files are no room."""
    edges: dict[str, set[str]] = defaultdict(set)
    for path in MODULES:
        here = room_of(module_of(path), top)
        if here is None:
            continue
        edges[here] |= {room for m in facts(path).imports if (room := room_of(m, top)) is not None}
    return {room: seen - {room, ""} for room, seen in edges.items() if room}


def arrows_up(edges: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The imports between rooms that reach each other: none of them can be the upper one."""
    reach = {room: set(seen) for room, seen in edges.items()}
    for middle in edges:
        for room, seen in reach.items():
            if middle in seen:
                reach[room] = seen | reach[middle]
    return {(a, b) for a, seen in edges.items() for b in seen if a in reach.get(b, set())}


def classes() -> Counter[str]:
    return Counter(name for path in MODULES for name in facts(path).classes)


def words() -> Counter[str]:
    """How often a listed word is the name of a variable, an argument, a function or a field."""
    counts = sum((facts(path).names for path in MODULES), Counter[str]())
    return Counter({word: counts[word] for word in WORDS if counts[word]})


def loaded_by(statement: str) -> int:
    """Modules of ours that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(sum(m.startswith('allranks') for m in sys.modules))"
    return int(subprocess.check_output([sys.executable, "-c", code], text=True))


def figures() -> dict[str, Any]:
    listed = words()
    return {
        "files": len(MODULES),
        "lines": sum(path.read_text().count("\n") for path in MODULES),
        **{f"rooms in {top}/": len(rooms(top)) for top in ROOMS},
        **{f"imports in a circle of rooms, {top}/": len(arrows_up(rooms(top))) for top in ROOMS},
        "class names used twice": sum(times > 1 for times in classes().values()),
        "listed words as names": sum(listed.values()),
        "of them asked, found": sum(listed[word] for word in PARTS_OF_AN_ERROR),
        "modules that `from allranks.torch import Task` loads": loaded_by(
            "from allranks.torch import Task"
        ),
    }


# --- trips -----------------------------------------------------------------------------------


STRATEGIES = ("ddp", "zero2", "fsdp", "gpipe")


@contextmanager
def trip(about: dict[str, Any], name: str) -> Iterator[None]:
    """Counts the files of ours that run meanwhile, and the calls into them."""
    files: Counter[str] = Counter()

    def call(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            files[frame.f_code.co_filename] += 1

    sys.setprofile(call)
    try:
        yield
    finally:
        sys.setprofile(None)
        about[f"{name}: files"], about[f"{name}: calls"] = len(files), sum(files.values())
        about["lists"] = about.get("lists", {})
        about["lists"][name] = sorted(str(Path(file).relative_to(SOURCE)) for file in files)


def train_as_a_rank(folder: Path) -> None:
    """In each of two ranks: the third step of a small MLP under each strategy, and a save."""
    import torch  # noqa: PLC0415
    from torch import Tensor, nn  # noqa: PLC0415

    from allranks.job.job import Job  # noqa: PLC0415
    from allranks.torch import Task, Trainer  # noqa: PLC0415

    class Small(Task):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

        def train_data(self) -> tuple[Tensor, Tensor]:
            draws = torch.Generator().manual_seed(0)
            return torch.randn(256, 8, generator=draws), torch.arange(256) % 4

        def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(output, batch[1], reduction="none")

    about: dict[str, Any] = {}
    for strategy in STRATEGIES:
        job = Job(strategy=strategy, run_dir=str(folder / f"run-{strategy}"))
        with Trainer(Small(), job) as trainer:
            for number, batch in enumerate(trainer.batches(steps=4)):
                if number == 2:
                    with trip(about, f"a step of {strategy}"):
                        trainer.step(batch)
                else:
                    trainer.step(batch)
            if strategy == "ddp":
                with trip(about, "a save"):
                    trainer.save(wait=True)
    if trainer.world.rank == 0:
        (folder / "trips.json").write_text(json.dumps(about))


def trips() -> dict[str, Any]:
    about: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "allranks.cli.main", "run", "--ranks", "2"]
        words += ["--run-dir", f"{folder}/script", "--"]
        words += [sys.executable, __file__, "--rank", folder]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        about |= json.loads(Path(folder, "trips.json").read_text())
        from allranks.cli.main import cli  # noqa: PLC0415

        job = ["train", "digits", "--ranks", "2", "--steps", "4", "--run-dir", f"{folder}/launch"]
        with open(os.devnull, "w") as nothing:
            screen, sys.stderr = sys.stderr, nothing
            try:
                with trip(about, "a launch of two ranks"):
                    cli(job, standalone_mode=False)
            finally:
                sys.stderr = screen
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trips", action="store_true", help="also count the files of trips")
    parser.add_argument("--list", action="store_true", help="also name the files of trips")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train_as_a_rank(Path(options.rank))
        return
    rows = figures() | (trips() if options.trips or options.list else {})
    lists = rows.pop("lists", {})
    for name, value in rows.items():
        print(f"{value:>8,}  {name}")
    for name in lists if options.list else ():
        print(f"\n{name}", *lists[name], sep="\n    ")


if __name__ == "__main__":
    main()

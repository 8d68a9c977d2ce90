"""The checks of the GPU session: each says what is expected, and what it has seen.

A check is a function of a `Setting`; it runs in a process of its own (`gpu_session.py --one`), so
whatever it does to torch or to the device is over with it. Those here start `allranks train`, and
import nothing of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TASKS = HERE / "gpu_tasks.py"
NEEDED = ("torch", "numpy", "click", "safetensors", "rich", "psutil", "pytest")
NOT_HERE = "not on this device"


@dataclass(frozen=True)
class Setting:
    """On what the checks run; `small` models, for a rehearsal on a CPU."""

    device: str
    small: bool

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True)
class Seen:
    """What a check has found; `good` is `None` where this device cannot show it."""

    good: bool | None
    found: dict[str, Any]


@dataclass(frozen=True)
class Check:
    """`act` runs for `limit_s` at most; `expected` stands in the table beside what is seen."""

    name: str
    expected: str
    limit_s: float
    act: Callable[[Setting], Seen] = field(repr=False)


CHECKS: dict[str, Check] = {}


def check(expected: str, limit_s: float = 60.0) -> Callable[[Any], Any]:
    """Make a check of a function; the order of the file is the order of importance."""

    def add(act: Callable[[Setting], Seen]) -> Callable[[Setting], Seen]:
        CHECKS[act.__name__] = Check(act.__name__, expected, limit_s, act)
        return act

    return add


# --- trainings through the launcher ---------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """How `allranks train` ended: its exit code, its summary, and the end of what it said."""

    code: int
    summary: dict[str, Any]
    said: str

    @property
    def digest(self) -> str:
        """The digest of the weights, or why there is none."""
        return str(self.summary.get("weights_sha256") or f"exit {self.code}: {self.said[-300:]}")

    def short(self) -> str:
        return self.digest if self.code else self.digest[:12]


def train(
    setting: Setting, task: str, *words: str, ranks: int = 1, limit_s: float = 300.0
) -> Trained:
    """`allranks train` of a task of `gpu_tasks`; several ranks share the device."""
    environment = {**os.environ, "GPU_SESSION_SHARE": "1" if ranks > 1 else ""}
    begin = [sys.executable, "-c", "from allranks.cli.main import main; main()", "train"]
    flags = ["--device", setting.device, "--ranks", str(ranks), "--threads", "1", "--json"]
    with tempfile.TemporaryDirectory(prefix="gpu-session-") as folder:
        where = [] if "--run-dir" in words else ["--run-dir", f"{folder}/run"]
        command = [*begin, f"{TASKS}:{task}", *flags, *where, *words]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired as late:
            return Trained(124, {}, f"ran past {limit_s:.0f} s: {str(late.stderr or '')[-500:]}")
    line = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        summary = json.loads(line)
    except ValueError:
        summary = {}
    return Trained(done.returncode, summary if done.returncode == 0 else {}, done.stderr[-3000:])


def beside(setting: Setting, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Jobs of the launcher beside each other, where a device is shared; the CPU has one at a time.

    They take turns there, as several would take each other's time and tell nothing more.
    """
    with ThreadPoolExecutor(4 if setting.on_gpu else 1) as pool:
        return list(pool.map(lambda job: job(), jobs))


def missing() -> list[str]:
    """What allranks and this session import, and this Python does not have."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


# --- the machine ----------------------------------------------------------------------------------


@check("torch >= 2.11 with CUDA, and a device; what is missing is named", 60)
def machine(setting: Setting) -> Seen:
    lacks = missing()
    torch, c10d = (importlib.import_module(name) for name in ("torch", "torch.distributed"))
    accelerator = importlib.import_module("allranks.torch.accelerator")
    lacks += [f"torch.distributed.{n}" for n in ("all_gather_single",) if not hasattr(c10d, n)]
    found = {"python": sys.version.split()[0], "torch": torch.__version__, "lacks": lacks}
    found |= accelerator.decides_bits(setting.device)
    if setting.on_gpu:
        found["devices"] = accelerator.count(setting.device)
        found["memory"] = torch.get_device_module(setting.device).mem_get_info()[1]
    return Seen(not setting.on_gpu or bool(found["devices"]), found)


@check("exit 0: ranks of the fork server use the device, and evaluate", 90)
def trained_by_the_launcher(setting: Setting) -> Seen:
    done = train(setting, "Pictures", "--steps", "12")
    mfu, metrics = done.summary.get("mfu"), done.summary.get("eval")
    said = done.said[-400:] if done.code else ""
    return Seen(done.code == 0, {"exit": done.code, "mfu": mfu, "eval": metrics, "said": said})


@check("one digest in each row: twice on 1 rank, on 2 and on 4; with clipping too", 150)
def bitwise_on_1_2_and_4_ranks(setting: Setting) -> Seen:
    clipped = ("--set", "clip_norm=0.05")
    rows = {
        "Pictures": ("1124", ()),
        "Pictures, clipped": ("12", clipped),
        "Words": ("124", ()),
        "Words, clipped": ("12", clipped),
    }
    if setting.small:
        rows = {"Pictures": ("124", ()), "Pictures, clipped": ("12", clipped), "Words": ("12", ())}
    asked = [(row, int(n), words) for row, (ranks, words) in rows.items() for n in ranks]

    def digest(row: str, ranks: int, words: Sequence[str]) -> str:
        task = row.partition(",")[0]
        return train(setting, task, "--bitwise", "--steps", "10", *words, ranks=ranks).short()

    ended = beside(setting, [lambda one=one: digest(*one) for one in asked])
    found: dict[str, list[str]] = {}
    for (row, _, _), one in zip(asked, ended, strict=True):
        found.setdefault(row, []).append(one)
    good = all(len(set(row)) == 1 and "exit" not in row[0] for row in found.values())
    return Seen(good, found)


@check("in fp64, losses of 10 steps on 2 and 3 ranks within 1e-9 of 1 rank", 120)
def one_and_several_ranks(setting: Setting) -> Seen:
    strategies = ("ddp", "fsdp") if setting.small else ("ddp", "ddp:reduce=tree", "zero1", "fsdp")
    words = ("--precision", "fp64", "--steps", "10")
    jobs = [("single", 1), *((name, 2) for name in strategies), ("ddp", 3)]

    def run(name: str, ranks: int) -> Trained:
        return train(setting, "Pictures", "--strategy", name, *words, ranks=ranks)

    ended = beside(setting, [lambda one=one: run(*one) for one in jobs])
    wanted = ended[0].summary.get("eval", {}).get("loss")
    found: dict[str, Any] = {"single": wanted}
    good = wanted is not None
    for (name, ranks), done in zip(jobs[1:], ended[1:], strict=True):
        loss = done.summary.get("eval", {}).get("loss")
        off = None if loss is None or wanted is None else abs(loss / wanted - 1)
        found[f"{name} on {ranks}"] = off if off is not None else done.said[-300:]
        good = good and off is not None and off < 1e-9
    return Seen(good, found)


@check("killed at step 7 and started again by itself: the digest of a training without a break", 90)
def killed_and_gone_on(setting: Setting) -> Seen:
    words = ("--bitwise", "--steps", "12", "--checkpoint-every", "4")
    fault = ("--max-restarts", "1", "--inject", "kill@rank=1,step=7")
    jobs = [
        lambda: train(setting, "Pictures", *words),
        lambda: train(setting, "Pictures", *words, *fault, ranks=2),
    ]
    whole, again = beside(setting, jobs)
    restarts = again.summary.get("restarts")
    found = {"whole": whole.short(), "killed": again.short(), "restarts": restarts}
    return Seen(whole.code == 0 and whole.digest == again.digest and restarts == 1, found)


@check("exit 1, `out of memory`, and on a GPU what is held by size of the blocks", 60)
def out_of_memory(setting: Setting) -> Seen:
    done = train(setting, "TooLarge", "--steps", "3")
    held = [line for line in done.said.splitlines() if "held on" in line or " × " in line][:4]
    good = done.code == 1 and "out of memory" in done.said and (bool(held) or not setting.on_gpu)
    return Seen(good, {"exit": done.code, "held": held, "said": "" if good else done.said[-400:]})


@check("rank 1 is missing, rank 0 waits", 60)
def who_hangs(setting: Setting) -> Seen:
    told = told_of_a_hang(setting, ranks=2)
    return Seen(names_rank_1(told), {"told": told})


def told_of_a_hang(setting: Setting, *more: str, ranks: int = 1) -> list[str]:
    """What the report says of each rank of a job in which rank 1 stands still."""
    words = ("--steps", "400", "--hang-timeout", "6", "--inject", "hang@rank=1,step=9", *more)
    done = train(setting, "Pictures", *words, ranks=ranks)
    told = [ln[:140] for ln in done.said.splitlines() if " missing" in ln or " waits " in ln]
    return told or [done.said[-400:]]


def names_rank_1(told: Sequence[str]) -> bool:
    """Whether rank 1 alone is missing."""
    missing_ones = [line for line in told if " is missing" in line]
    return len(missing_ones) == 1 and missing_ones[0].startswith("rank 1 ")


@check("the flipped bit is found by --verify-every, on all ranks", 60)
def corrupted_weights_are_found(setting: Setting) -> Seen:
    words = ("--steps", "8", "--verify-every", "2", "--inject", "corrupt@rank=1,step=3")
    done = train(setting, "Pictures", *words, ranks=2)
    good = done.code == 1 and "must hold the same weights" in done.said
    return Seen(good, {"exit": done.code, "said": done.said[-400:] if not good else ""})

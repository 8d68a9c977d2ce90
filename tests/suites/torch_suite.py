"""torch's own tests of `torch.distributed`, on Gloo and on our shared memory: which passes which.

    python tests/suites/torch_suite.py --backend shared_memory test_all_reduce_sum …

The tests are those of `torch/testing/_internal/distributed/distributed_test.py`, which is part of
every wheel of torch. Each rank of each test is a fork of this
process, which has imported torch. The tests are told that the backend is Gloo, since they compare
its name; `in_place_of_gloo` makes the group, as in `allranks run --shared-memory`. With `--forced`
no test is skipped for its backend, its number of ranks or for want of a GPU: what a test moves to
the current device stays on the CPU.

All of them, and the table `torch_suite.json` beside this file from what they say:

    for backend in gloo shared_memory; do
        for more in "" --forced "--forced --ranks 4"; do
            python tests/suites/torch_suite.py --backend $backend --out rows $more
        done
    done
    python tests/suites/torch_suite.py --table rows

A run that was stopped goes on where it was. `docs/suites.md` quotes the table, and
`test_torch_suite.py` runs some of its rows.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import importlib
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.overrides import TorchFunctionMode

from allranks.torch.shared_memory import posting
from allranks.torch.shared_memory.backend import in_place_of_gloo

TABLE = Path(__file__).with_suffix(".json")
BACKENDS = ("gloo", "shared_memory")
INTERNAL = "torch.testing._internal"
SUITE = f"{INTERNAL}.distributed.distributed_test"
TEST_S = 60.0
GRACE_S = 5.0  # a rank whose peer has failed ends in this time, or is killed
Row = dict[str, Any]
OF_MORE_RANKS = [  # torch skips them here for something else
    "test_all_to_all_group",
    "test_all_to_all_group_cuda",
    "test_all_to_all_single_equal_split_group",
    "test_all_to_all_single_equal_split_group_cuda",
    "test_all_to_all_single_unequal_split_group",
]
FAILED_EXIT, SKIPPED_EXIT = 10, 88  # torch's own is 10; 88 is none of torch's


def suite(ranks: int, forced: bool = False) -> Any:
    """The class of torch's tests, for so many ranks. Once in a process."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(ranks), INIT_METHOD="file://")
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if importlib.util.find_spec("expecttest") is None:  # its texts are compared in other suites
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    if forced:
        skip_nothing()
    module = importlib.import_module(SUITE)
    module.Barrier.sync.__func__.__defaults__ = (None, TEST_S)  # of this module, in files
    logging.disable(logging.INFO)

    class OfTorch(Forked, module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        pass

    OfTorch.forced = forced
    return OfTorch


def skip_nothing() -> None:
    """Before the tests are imported: no decorator of theirs skips, and devices are the CPU."""
    common: Any = importlib.import_module(f"{INTERNAL}.common_distributed")
    utils: Any = importlib.import_module(f"{INTERNAL}.common_utils")

    def none() -> Callable[..., None]:
        return lambda *_, **__: None

    def as_it_is(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda test: test

    for name in ("skip_but_pass_in_sandcastle_if", "skip_but_pass_in_sandcastle"):
        setattr(utils, name, as_it_is)
    for name in ("skip_if_no_gpu", "skip_if_small_worldsize", "skip_if_odd_worldsize"):
        setattr(common, name, lambda test: test)
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common, name, as_it_is)
    common.init_multigpu_helper = lambda ranks, _: {rank: [rank] for rank in range(int(ranks))}
    torch.accelerator.set_device_index, torch.cuda.set_device = none(), none()
    torch.accelerator.current_device_index = torch.cuda.current_device = lambda: 0
    torch.accelerator.synchronize, torch.cuda.synchronize = none(), none()
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
        kind.to = on_the_cpu(kind.to)  # type: ignore[method-assign]
    wrapper: Any = torch.nn.parallel.DistributedDataParallel
    wrapper.__init__ = without_devices(wrapper.__init__)


def on_the_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    """`to`, which stays where it is for the number of a device."""

    def moved(self: Any, *args: Any, **named: Any) -> Any:
        is_number = bool(args) and isinstance(args[0], int)
        return self if is_number else to(self, *args, **named)

    return moved


def without_devices(make: Callable[..., None]) -> Callable[..., None]:
    """DDP's `__init__`, for a module on the CPU."""

    def made(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *more: Any,
        **named: Any,
    ) -> None:
        make(self, module, None, None, *more, **named)

    return made


class OnTheCpu(TorchFunctionMode):
    """A device by its number is the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class Forked:
    """How a test of torch runs: its process waits for the ranks, forks which run its body."""

    backend, folder, forced = "gloo", "", False
    processes: list[Any]
    pid_to_pipe: dict[int, Any]

    def setUp(self) -> None:
        os.environ.pop("MASTER_PORT", None)
        super().setUp()  # type: ignore[misc]
        self._start_processes(self.forked)  # type: ignore[attr-defined]

    def forked(self, target: Callable[..., None], args: tuple[Any, ...], **named: Any) -> Any:
        """A rank. As a program of its own, it runs at its end what is registered for that."""
        run = (self.backend, self.folder, target, *args)
        return mp.get_context("fork").Process(target=as_a_program, args=run, **named)

    def run_test(self, test_name: str, pipe: Any) -> None:
        """In a rank: the body of the test. What it raises goes to the process that waits."""
        importlib.import_module(f"{INTERNAL}.common_utils").set_rng_seed()
        try:
            with OnTheCpu() if self.forced else nullcontext():
                getattr(self, test_name)()
        except unittest.SkipTest as skip:
            pipe.send(str(skip))
            sys.exit(SKIPPED_EXIT)
        except Exception:
            pipe.send(traceback.format_exc())
            sys.exit(FAILED_EXIT)

    def _join_processes(self, test: Any) -> None:
        began = time.monotonic()
        is_late = not self.await_ranks(began + TEST_S)
        if is_late:
            for process in self.alive():
                os.kill(process.pid, signal.SIGUSR1)  # its stacks, into its log
            time.sleep(0.5)
        skipped = [each for each in self.processes if each.exitcode == SKIPPED_EXIT]
        errors = [self.pid_to_pipe[each.pid].recv() for each in skipped if not is_late]
        alive = self.alive()
        self.kill()
        if is_late or (alive and not self.failed()):
            raise TimeoutError(f"ranks without an end:\n{self.logs()}")
        if errors:
            raise unittest.SkipTest(errors[0])
        self._check_return_codes(test, time.monotonic() - began)  # type: ignore[attr-defined]

    def await_ranks(self, until: float) -> bool:
        """Whether all have ended, or one has failed and the others had time to follow it."""
        limit = until
        while (alive := self.alive()) and time.monotonic() < limit:
            wait([each.sentinel for each in alive], max(0.0, limit - time.monotonic()))
            if self.failed():
                limit = min(limit, time.monotonic() + GRACE_S)
        return not self.alive() or bool(self.failed())

    def alive(self) -> list[Any]:
        return [each for each in self.processes if each.exitcode is None]

    def failed(self) -> list[Any]:
        return [each for each in self.processes if each.exitcode not in (None, 0)]

    def kill(self) -> None:
        for process in self.alive():
            process.kill()
            process.join()

    def logs(self) -> str:
        files = sorted(Path(self.folder).glob("log-*"))
        return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')}" for file in files)

    def tearDown(self) -> None:
        self.kill()
        for file in Path(self.folder).glob("log-*"):
            file.unlink()
        super().tearDown()  # type: ignore[misc]
        Path(self.file_name).unlink(missing_ok=True)  # type: ignore[attr-defined]


def as_a_program(
    backend: str, folder: str, target: Callable[..., None], rank: int, *args: Any, **named: Any
) -> None:
    """Run `target` as the rank of a program that `allranks run` has started on this backend."""
    atexit._clear()
    log = os.open(f"{folder}/log-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    if backend == "shared_memory":
        in_place_of_gloo(f"{folder}/outcome")
        atexit.register(posting._leave_all)
    try:
        target(rank, *args, **named)
    finally:
        atexit._run_exitfuncs()


class Outcomes(unittest.TestResult):
    """The outcome of each test by its name: "pass", or "skip: " or "fail: " and why."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.monotonic()

    def _note(self, test: unittest.TestCase, outcome: str) -> None:
        name = test.id().rpartition(".")[2]
        self.of[name] = outcome
        self.seconds[name] = round(time.monotonic() - self._began, 2)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "pass")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, f"skip: {reason}")

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, "fail: " + "".join(traceback.format_exception(*err)))

    addFailure = addError  # unittest's name

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, "pass")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "fail: expected to fail")


def outcomes(tests: Any, names: Sequence[str], backend: str) -> Iterator[tuple[str, str, float]]:
    """Run tests of a `suite` one by one: the name, the outcome and the seconds of each."""
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        os.environ["TEMP_DIR"] = folder
        tests.backend, tests.folder = backend, folder
        meeting = Path(folder, "meeting")
        sys.modules[SUITE].INIT_METHOD = meeting.as_uri()  # type: ignore[attr-defined]
        for name in names:
            meeting.unlink(missing_ok=True)
            results = Outcomes()
            unittest.TestSuite([tests(name)]).run(results)
            for test, outcome in results.of.items():
                yield test, outcome, results.seconds[test]


def remaining(names: Sequence[str], rows: Sequence[Row], forced: bool, ranks: int) -> list[str]:
    """The tests that are not in `rows` yet; `forced`, those that torch skips and this can call.

    With the number of ranks go the tests that torch skips for it.
    """
    done = {row["test"] for row in rows if (row["forced"], row["ranks"]) == (forced, ranks)}
    skips = {row["test"]: row["outcome"] for row in rows if row["outcome"].startswith("skip")}
    needed = [name for name in names if name not in done]
    if not forced:
        return needed
    of_more = {name for name, why in skips.items() if "world size" in why} | {*OF_MORE_RANKS}
    return [name for name in needed if name in skips and (name in of_more) == (ranks > 2)]


def rows_of(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def summary(outcome: str) -> str:
    """An outcome in a line: of a failure the first error of a rank, without what it quotes."""
    errors = [
        line for line in re.findall(r"^[\w.]*Error: .+", outcome, re.M) if " exited " not in line
    ]
    if not outcome.startswith("fail") or not errors:
        return outcome.splitlines()[0]
    return "fail: " + re.sub(r"\[[^]]*:\d[^]]*\]", "[…]", errors[0])[:100]


def write_table(rows: Sequence[Row]) -> None:
    """A line for each test: of its plain run, or the forced one where torch skips that."""
    tests: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: (row["test"], row["forced"])):
        last = tests.get(row["test"], {})
        if last.get("forced") != row["forced"]:
            last = {"test": row["test"], "ranks": row["ranks"], "forced": row["forced"]}
        tests[row["test"]] = last | {row["backend"]: summary(row["outcome"])}
    lines = ",\n".join(json.dumps(test, ensure_ascii=False) for test in tests.values())
    TABLE.write_text(f'{{"torch": "{torch.__version__}", "tests": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tests", nargs="*", help="names of tests; all of them without one")
    parser.add_argument("--backend", choices=BACKENDS, default="shared_memory")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--forced", action="store_true", help="call what torch skips here, too")
    parser.add_argument("--out", type=Path, help="a line of JSON for each test is added here")
    parser.add_argument("--table", type=Path, help="run nothing: these lines are the new table")
    asked = parser.parse_args()
    if asked.table:
        write_table(rows_of(asked.table))
        return
    tests = suite(asked.ranks, asked.forced)
    names = asked.tests
    if not names:
        names = unittest.defaultTestLoader.getTestCaseNames(tests)
        rows = [] if asked.out is None else rows_of(asked.out)
        rows = [row for row in rows if row["backend"] == asked.backend]
        names = remaining(names, rows, asked.forced, asked.ranks)
    for name, outcome, seconds in outcomes(tests, names, asked.backend):
        print(f"{seconds:6.2f} s {name} {outcome if asked.tests else summary(outcome)}", flush=True)
        if asked.out:
            row = {"test": name, "backend": asked.backend, "ranks": asked.ranks}
            row |= {"forced": asked.forced, "outcome": outcome, "seconds": seconds}
            with asked.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

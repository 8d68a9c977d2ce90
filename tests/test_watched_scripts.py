"""`allranks check -- script`: each fault of a tutorial is found, its corrected twin is silent."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.scripts.on_path import path_with_hooks
from allranks.launcher.scripts.plan import CommandRequest
from allranks.launcher.scripts.run import run_command
from allranks.tools.script_check.record.facts import StepCounts
from allranks.tools.script_check.record.stepping import Replicas
from allranks.tools.script_check.rules import watch as watch_rules
from allranks.tools.script_check.rules.facts import FACTS, watched_request
from allranks.tools.script_check.rules.watch import Watched, watched_in

SPAWNING = Path(__file__).parent / "scripts" / "imagenet_spawn.py"
SCRIPT = Path(__file__).parent / "watched" / "tutorial.py"
DOCS = Path(__file__).parent.parent / "docs"
OTHER_KINDS = SCRIPT.with_name("kinds.py")
COMMAND = (sys.executable, "-m", "allranks.cli.main", "check")

FAULTS = {
    "same-order": ("same-order-each-epoch", "sampler = DistributedSampler(data)"),
    "anew same-order": ("same-order-each-epoch", "sampler = DistributedSampler(data)"),
    "never-reduced": ("step-without-reduction", "optimizer.step()"),
    "outside": ("parameters-outside-ddp", "optimizer.step()"),
    "no-sampler": ("same-samples-on-ranks", "DataLoader(data, batch_size=BATCH, shuffle=True)"),
    "too-many-replicas": ("sampler-for-other-ranks", "num_replicas=2 * ranks"),
    "sharded no-sampler": (
        "same-samples-on-ranks",
        "DataLoader(data, batch_size=BATCH, shuffle=True)",
    ),
    "padded": ("padded-evaluation", "DistributedSampler(data, shuffle=False)"),
    "padded-shares": ("padded-evaluation", "DistributedSampler(data, shuffle=False)"),
    "means-times-ranks": ("mean-times-ranks", "print(f"),
    "unequal": ("mean-of-unequal-means", "return DataLoader(data, batch_size=BATCH), None"),
    "module": ("replicas-drift", "model = DDP("),
    "buffers": ("replicas-drift", "model = DDP("),
    "no-ddp": ("gradients-of-one-rank", "optimizer.step()"),
    "by-hand": ("weights-begin-unequal", "optimizer.step()"),
    "dropout": ("equal-random-streams", "outputs = called(inputs)"),
    "dropout as-lightning": ("equal-random-streams", "outputs = called(inputs)"),
    "augmented": ("equal-random-streams", "DataLoader(data, batch_size=BATCH, sampler=sampler"),
    "workers-of-ranks": ("equal-random-streams", "sampler=sampler, **workers)"),
    "workers-alike": ("equal-random-streams", "sampler=sampler, **workers)"),
    "workers-each-epoch": ("same-draws-each-epoch", "sampler=sampler, **workers)"),
    "means-reduced": ("mean-of-means", "dist.all_reduce(mean)"),
    "means-summed": ("mean-of-means", "dist.all_reduce(summed)"),
    "means-printed": ("mean-of-means", "print(f"),
    "shares-of-ranks": ("mean-of-means", "dist.all_reduce(share"),
    "too-fast": ("schedule-too-fast", "scheduler.step()"),
    "ahead": ("schedule-ahead", "scheduler.step()"),
    "no-division": ("accumulation-not-divided", "loss.backward()"),
    "always-reduced": ("reduced-at-each-micro-batch", "loss.backward()"),
    "saved": ("checkpoint-of-all-ranks", "torch.save("),
    "read-early": ("read-while-written", "torch.load(path"),
    "written": ("file-of-all-ranks", "with open("),
    "printed": ("printed-by-all-ranks", "print("),
}
TWINS = (
    "evaluated-twin dropout-twin augmented-twin schedule-twin",
    "workers-twin means-twin",
    "accumulated-twin buffers-twin",
    "by-hand-twin read-twin",
    "sharded anew",
)


KINDS = {
    "tokens": ("mean-of-unequal-means", "loss = F.cross_entropy(outputs, labels)", "targets"),
    "weights": ("mean-of-unequal-means", "nn.NLLLoss(CLASS_WEIGHTS)(", "class weights"),
    "clip": ("clip-before-unscale", "clip_grad_norm_(", "scaled by 65536"),
    "rates": ("replicas-drift", "model = DDP(", "the learning rates of the ranks are 0.5 and 0.0"),
    "unfrozen": ("replicas-drift", "model = DDP(", "DDP does not reduce 0.weight, 0.bias"),
    "changed": ("replicas-drift", "model = DDP(", "no cause was seen"),
    "skips": ("unequal-steps", "model = DDP(", "the ranks made 8 and 4 steps: rank 1"),
    "split": ("split-of-each-rank", "return DataLoader(", "the Subset behind the sampler"),
    "shuffled": ("split-of-each-rank", "return DataLoader(", "are other samples on another rank"),
    "draws": ("equal-batches", "loss_of(model(inputs), labels)", "the first 4 inputs of the DDP"),
    "gathered": ("padded-evaluation", "return DataLoader(", "gives the losses of all that it read"),
}
"""Those of `kinds.py`: the name, a part of the line, and a part of what was found."""
HARMLESS = (
    *("constant", "wrapped", "closure", "cleared", "oversampled", "objects", "logged", "tasks"),
    "printed",
)
"""Others of `kinds.py`, which have no fault."""


EXAMPLES = {
    "digits_in_one_process.py": 1,
    "words_in_one_process.py": 1,
    "series.py": 2,
    "characters.py": 2,
    "sharded.py": 2,
}
"""Each with the ranks that it is for."""


ENDLESS = """
import os, signal
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(10**7, 1))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for number, (batch,) in enumerate(DataLoader(data, batch_size=4)):
    if number == 9 and dist.get_rank() == 0:
        os.kill(int(os.environ["LAUNCHER"]), signal.SIGTERM)
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""

LATE_THREADS = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for task in Path("/proc/self/task").iterdir():
    os.sched_setaffinity(int(task.name), {min(os.sched_getaffinity(0))})
    if (task / "comm").read_text().strip() == "pt_gloo_runloop":
        os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
for _ in range(9):
    dist.all_reduce(torch.ones(4))
"""
"""A thread of Gloo still has a tensor when Python ends: unwatched, the script aborts."""


def request_for(folder: Path, *words: str, script: Path = SCRIPT, ranks: int = 2) -> CommandRequest:
    command = (sys.executable, "-u", str(script), *words)
    saved_in = (("SAVED_IN", str(folder)),)
    return CommandRequest(command, ranks, warm="torch", shown="none", environment=saved_in)


def watch(
    server: ForkServer, folder: Path, words: str, script: Path = SCRIPT, ranks: int = 2
) -> Watched:
    request = request_for(folder, *words.split(), script=script, ranks=ranks)
    request = watched_request(request, str(folder / "run"), os.environ)
    run_command(request, server)
    return watched_in(folder / "run" / FACTS)


@pytest.mark.slow(but=1, most=11)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_nothing_else(fault: str, server: ForkServer, tmp_path: Path) -> None:
    watched = watch(server, tmp_path, fault)
    name, code = FAULTS[fault]
    assert [one.name for one in watched.findings] == [name], str(watched)
    where = watched.findings[0].where
    assert where is not None and where[0] == str(SCRIPT)
    assert code in SCRIPT.read_text().splitlines()[where[1] - 1]
    assert not watched.unwatched


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("words", TWINS)
def test_the_corrected_twin_is_silent(words: str, server: ForkServer, tmp_path: Path) -> None:
    watched = watch(server, tmp_path, words)
    assert not watched.findings and not watched.unwatched, str(watched)
    assert watched.ranks == 2


@pytest.mark.slow(most=4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_found_with_its_cause(kind: str, server: ForkServer, tmp_path: Path) -> None:
    watched = watch(server, tmp_path, kind, OTHER_KINDS)
    name, code, words = KINDS[kind]
    assert [one.name for one in watched.findings] == [name], str(watched)
    (found,) = watched.findings
    assert found.where is not None and words in found.found
    assert code in OTHER_KINDS.read_text().splitlines()[found.where[1] - 1]
    assert not watched.unwatched


@pytest.mark.slow
def test_the_corrected_twins_of_all_kinds_are_silent(server: ForkServer, tmp_path: Path) -> None:
    words = " ".join(f"{kind}-twin" for kind in (*KINDS, *HARMLESS))
    watched = watch(server, tmp_path, words, OTHER_KINDS)
    assert not (watched.findings or watched.notes or watched.unwatched), str(watched)


@pytest.mark.slow
def test_padding_that_may_not_be_counted_is_a_note(server: ForkServer, tmp_path: Path) -> None:
    watched = watch(server, tmp_path, "padded-note")
    assert not watched.findings and [one.name for one in watched.notes] == ["padded-evaluation"]
    watched = watch(server, tmp_path / "trimmed", "trimmed", OTHER_KINDS)
    assert not watched.findings and [one.name for one in watched.notes] == ["padded-evaluation"]


@pytest.mark.slow
def test_what_looks_like_a_fault_and_is_none(server: ForkServer, tmp_path: Path) -> None:
    watched = watch(server, tmp_path, "", script=SCRIPT.with_name("harmless.py"))
    assert not watched.findings and not watched.unwatched, str(watched)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_torch_s_own_examples_do_is_no_fault(
    name: str, server: ForkServer, tmp_path: Path
) -> None:
    """Scripts of the shape of torch's examples, on made-up data: the corrected ones are silent."""
    watched = watch(server, tmp_path, "", SCRIPT.parent / "examples" / name, EXAMPLES[name])
    assert not watched.findings and not watched.unwatched, str(watched)
    assert watched.ranks == EXAMPLES[name]


@pytest.mark.slow
def test_a_script_computes_what_it_does_unwatched(server: ForkServer, tmp_path: Path) -> None:
    """Dropout, noise on samples, a schedule: equal bits, so nothing was drawn and nothing moved."""
    words = ("dropout-twin", "augmented-twin", "schedule-twin", "buffers-twin")
    plain = request_for(tmp_path, *words)
    saved = []
    for way in ("plain", "watched"):
        run_dir = str(tmp_path / way)
        request = dataclasses.replace(plain, run_dir=run_dir)
        if way == "watched":
            request = watched_request(request, run_dir, os.environ)
        run_command(request, server)
        saved.append(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert len(list((tmp_path / "watched" / FACTS).glob("*.jsonl"))) == 2


@pytest.mark.slow
def test_ranks_that_a_script_spawns_itself_are_watched(tmp_path: Path) -> None:
    """One process starts two: what they find out they are is what counts, not the launcher's."""
    words = [*COMMAND, "--ranks", "1", "--json", "--", str(SPAWNING)]
    words += ["--multiprocessing-distributed", "-j", "0"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["ranks"], told["findings"], told["unwatched"]) == (2, [], [])


@pytest.mark.slow
def test_the_verb_watches_a_script_of_its_own_process(tmp_path: Path) -> None:
    """Not from a warm server: Python itself imports the watcher, on its way to torch."""
    words = ["--ranks", "2", "--json", "--", str(SCRIPT), "printed", "saved"]
    environment = {**os.environ, "SAVED_IN": str(tmp_path)}
    done = subprocess.run(
        [*COMMAND, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    names = ["checkpoint-of-all-ranks", "printed-by-all-ranks"]
    assert [one["name"] for one in told["findings"]] == names
    assert "fix:    if rank == 0" in done.stderr


@pytest.mark.slow
def test_python_does_not_end_before_the_threads_of_gloo_are_idle(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE_THREADS)
    done = subprocess.run(
        [*COMMAND, "--", str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_script_that_fails_is_reported_as_run_does(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import torch\nraise ValueError('of the script')\n")
    done = subprocess.run(
        [*COMMAND, "--", str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "failed first" in done.stderr and "ValueError: of the script" in done.stderr


@pytest.mark.slow
def test_a_script_without_an_end_is_stopped_and_judged(tmp_path: Path) -> None:
    """A benchmark on made-up data, a training of weeks: what was seen until the limit counts."""
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    words = shlex.join([*COMMAND, "--warm", "--json", "--", str(script)])
    done = subprocess.run(
        ["sh", "-c", f"LAUNCHER=$$ exec {words}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130 and "interrupted (SIGTERM)" in done.stderr, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    names = [one["name"] for one in told["findings"]]
    assert names == ["same-samples-on-ranks"], done.stderr


@pytest.mark.slow
def test_what_never_imports_torch_was_not_watched(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print('no torch')\n")
    done = subprocess.run(
        [*COMMAND, "--", str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "imported torch" in done.stderr


def test_the_documents_name_a_script_and_its_twin_for_each_finding() -> None:
    """The names in the code, in both tables, and in the scripts of this file are the same."""
    rules = (
        Path(watch_rules.__file__).parent / f"{name}.py" for name in ("watch", "data", "replicas")
    )
    in_code = {
        name for path in rules for name in re.findall(r'"([a-z]+(?:-[a-z]+)+)"', path.read_text())
    }
    overview = (DOCS / "checking.md").read_text().partition("| name |")[2].partition("\n\n")[0]
    table = (DOCS / "checking_in_detail.md").read_text().partition("| finding |")[2]
    rows = re.findall(r"^\| `(.+)` \| `(.+)` \| `(.+)` \|$", table, re.MULTILINE)
    assert {name for name, *_ in rows} | {"printed-once-per-node"} == in_code
    assert set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", overview)) == in_code
    run = {f"{SCRIPT.name} {fault}": name for fault, (name, _) in FAULTS.items()}
    run |= {f"{OTHER_KINDS.name} {kind}": name for kind, (name, *_) in KINDS.items()}
    assert {script: name for name, script, _ in rows} == run
    twins = {SCRIPT.name, *(f"{OTHER_KINDS.name} {kind}-twin" for kind in KINDS)}
    twins |= {f"{SCRIPT.name} {twin}" for words in TWINS for twin in words.split()}
    assert {twin for *_, twin in rows} <= twins


def test_lines_that_a_library_reads_itself_are_no_output(tmp_path: Path) -> None:
    """dill redirects what `dis` prints, and `datasets` calls dill."""
    code = (
        "import contextlib, io, torch\n"
        "from allranks.tools.script_check.record.facts import ScriptFacts, StepCounts\n"
        "from allranks.tools.script_check.record.install import FileFacts\n"
        f"facts = ScriptFacts({str(tmp_path)!r}, '/torch')\n"
        "FileFacts(torch, facts, StepCounts()).install()\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    print('read by a library')\n"
        "with contextlib.redirect_stdout(open('/dev/null', 'w')):\n"
        "    print('read by nobody')\n"
        "print('seen')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    (facts,) = tmp_path.glob("*.jsonl")
    rows = map(json.loads, facts.read_text().splitlines())
    assert [row["text"] for row in rows if row["fact"] == "print"] == ["seen"]


def test_the_ranks_of_a_deepspeed_engine_reduce_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reductions are of buckets, so no gradient is seen in a collective."""

    class DeepSpeedEngine:
        data_parallel_group = "all"

    engine, written = DeepSpeedEngine(), []
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", SimpleNamespace(**{
        "DeepSpeedEngine": DeepSpeedEngine}))  # fmt: skip
    ranks_of = {"all": [0, 1]}.__getitem__
    fake = SimpleNamespace(distributed=SimpleNamespace(get_process_group_ranks=ranks_of))
    facts = SimpleNamespace(write=lambda kind, **values: written.append((kind, values["group"])))
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp", raising=False)
    Replicas(fake, facts, StepCounts()).write_sharded()  # type: ignore[arg-type]
    assert written == [("sharded", (0, 1))] and engine.data_parallel_group


def test_a_look_for_torch_before_its_import_does_not_end_the_wait(tmp_path: Path) -> None:
    """As `import datasets` does, and transformers: `find_spec` finds, and imports nothing."""
    (tmp_path / "torch.py").write_text("print('torch')\n")
    code = (
        "import sys, importlib.util, sitecustomize as hooks\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "hooks._change = lambda: print('patched')\n"
        "sys.meta_path.insert(0, hooks.AfterTorch())\n"
        "assert importlib.util.find_spec('torch') and importlib.util.find_spec('torch')\n"
        "import torch\n"
    )
    environment = {"PYTHONPATH": path_with_hooks({})}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["torch", "patched"], done.stderr

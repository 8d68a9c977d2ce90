"""`allranks replay`: steps of a run are made again in one process, with the bits of the run."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint.folder import committed, step_of
from allranks.checkpoint.format import digest, read_manifest, seal
from allranks.errors import RequestError
from allranks.job.run_folder import JsonLines, read_events, read_rows
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import Result
from allranks.tools.replay import REPLAYS, Replayed, ReplayRequest, plan_replay, replay
from conftest import TASKS
from launch_host import Host, Launch

Train = Callable[..., Result]
IMAGES = "contract_tasks:Images"
JOB = {"digest_every": 3, "checkpoint_every": 4, "steps": 12, "first_check": "off"}
KILLED = {"inject": "kill@rank=1,step=6", "max_restarts": 1}


def again(server: ForkServer, run: Path, step: int, **more: Any) -> Replayed:
    return replay(ReplayRequest(run, step, **more), server)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("zero1", 3), ("local-sgd:every=4", 2), ("ddp", 2), ("fsdp", 3), ("1f1b", 2)],
)
def test_a_step_of_any_strategy_has_the_bits_of_the_run(
    server: ForkServer, train: Train, strategy: str, ranks: int
) -> None:
    """After a kill and a restart. What follows the number of ranks is made on as many."""
    is_exact = not strategy.startswith("local-sgd")
    run = train(IMAGES, strategy=strategy, ranks=ranks, bitwise=is_exact, **JOB, **KILLED).run_dir
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    replayed = again(server, run, 10)
    assert replayed.is_equal and replayed.plan.start == 8
    assert replayed.plan.job.ranks == (1 if is_exact else ranks)
    assert replayed.digests == ([8, 9] if is_exact else [9]) and replayed.losses == 2
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    after.pop(run / REPLAYS)
    assert after == before


def test_a_replay_may_begin_at_the_beginning(server: ForkServer, train: Train) -> None:
    run = train(IMAGES, **JOB, keep=1, bitwise=True).run_dir
    replayed = again(server, run, 5)
    assert replayed.is_equal and replayed.plan.checkpoint is None
    assert replayed.digests == [3, 4] and replayed.losses == 5
    assert "step 12 and later" in str(replayed)


def test_a_step_that_was_computed_wrongly_is_named(server: ForkServer, train: Train) -> None:
    """A bit of a weight flipped before the tenth step, and nothing showed it."""
    run = train(IMAGES, **JOB, bitwise=True, inject="corrupt@step=9").run_dir
    replayed = again(server, run, 12)
    step, names = replayed.differs[0]
    assert step == 10 and "loss" in names
    assert "step 10 is the first step with other" in str(replayed)


def test_a_sharded_run_that_clips_nothing_has_the_bits_of_one_process(
    server: ForkServer, train: Train
) -> None:
    """It sums the norm of its gradients rank by rank: that is compared on as many ranks alone."""
    run = train("contract_tasks:Uneven", strategy="zero2", ranks=3, bitwise=True, **JOB).run_dir
    assert again(server, run, 12).is_equal
    assert again(server, run, 12, ranks=3).is_equal


def test_a_replay_that_ends_before_the_step_is_not_equal(server: ForkServer, train: Train) -> None:
    run = train(IMAGES, bitwise=True, **{**JOB, "steps": 6, "checkpoint_every": None}).run_dir
    with JsonLines(run / "metrics.jsonl") as file:
        file.row({**next(iter(read_rows(run / "metrics.jsonl"))), "step": 99})
    job = run / "job.toml"
    assert not again(server, run, 100).is_equal, job.read_text()


def test_a_resume_with_another_job_begins_another_course(server: ForkServer, train: Train) -> None:
    """The rows after it hold no more, and a replay makes no steps of two jobs."""
    run = train(IMAGES, "clip_norm=0.3", **JOB, bitwise=True).run_dir
    for folder in committed(run / "checkpoints"):
        if step_of(folder) > 4:
            shutil.rmtree(folder)
    train(IMAGES, "clip_norm=0.1", **JOB, bitwise=True, run_dir=str(run))
    assert not [e for e in read_events(run) if e["event"] == "digest_differs"]
    assert again(server, run, 7).is_equal
    shutil.rmtree(run / "checkpoints" / "step-00000004", ignore_errors=True)
    for folder in committed(run / "checkpoints"):
        if step_of(folder) < 8:
            shutil.rmtree(folder)
    with pytest.raises(
        RequestError, match="clip_norm: changed when the run was resumed after step 4"
    ):
        plan_replay(ReplayRequest(run, 7))


def test_a_bit_that_flips_in_a_checkpoint_is_named(server: ForkServer, train: Train) -> None:
    run = train(IMAGES, **JOB, bitwise=True).run_dir
    folder = next(f for f in committed(run / "checkpoints") if step_of(f) == 8)
    flip(folder, "common/model/9.weight")
    replayed = again(server, run, 9)
    assert replayed.differs[0] == (8, ["weights"])
    assert "step 8 is the checkpoint itself with other weights" in str(replayed)
    assert replayed.is_promised and not replayed.is_equal


def flip(folder: Path, name: str) -> None:
    """Flip a bit of a tensor in a checkpoint of one rank, and seal it again."""
    manifest = read_manifest(folder)
    ((file, about),) = manifest.files.items()
    content = bytearray((folder / file).read_bytes())
    size = int.from_bytes(content[:8], "little")
    where = json.loads(content[8 : 8 + size])[name]
    content[8 + size + where["data_offsets"][0]] ^= 1
    (folder / file).write_bytes(content)
    files = {file: replace(about, blake2b=digest(bytes(content)))}
    (folder / "manifest.json").write_bytes(seal(replace(manifest, files=files)))


def test_without_bitwise_it_says_how_far_the_losses_are(server: ForkServer, train: Train) -> None:
    run = train(IMAGES, strategy="ddp", ranks=2, **JOB).run_dir
    one, two = again(server, run, 10), again(server, run, 10, ranks=2)
    assert two.is_equal and two.plan.is_as_run
    assert one.worst < 1e-5 and not one.is_promised
    assert one.is_equal or "to rounding: without --bitwise" in str(one)


def test_a_program_that_has_changed_is_named(
    server: ForkServer, train: Train, tmp_path: Path
) -> None:
    file = tmp_path / "edited.py"
    shutil.copy(TASKS / "contract_tasks.py", file)
    run = train(f"{file}:Plain", steps=3, bitwise=True).run_dir
    file.write_text(file.read_text() + "\n# another line\n")
    with pytest.raises(RequestError, match=r"edited\.py.*another content") as error:
        again(server, run, 2)
    assert "--changed" in error.value.do
    replayed = again(server, run, 2, changed=True)
    assert replayed.is_equal and "has changed since the run" in replayed.plan.notes[0]


def test_what_cannot_be_replayed_is_refused(train: Train, tmp_path: Path) -> None:
    def refused(run: Path, step: int, **more: Any) -> str:
        with pytest.raises(RequestError) as error:
            plan_replay(ReplayRequest(run, step, **more))
        return error.value.found

    first = train(IMAGES, **JOB, bitwise=True).run_dir
    assert "has made 12 steps" in refused(first, 13)
    assert "no folder" in refused(tmp_path / "none", 1)
    branch = train(
        IMAGES, **{**JOB, "steps": 14, "checkpoint_every": 14}, resume=str(first)
    ).run_dir
    assert plan_replay(ReplayRequest(branch, 13)).start == 12
    assert "began after step 12" in refused(branch, 3)
    shutil.rmtree(first / "checkpoints")
    assert "is gone or does not hold" in refused(branch, 13)
    shutil.rmtree(branch / "checkpoints")
    job = (branch / "job.toml").read_text()
    (branch / "job.toml").write_text(job.replace('engine = "torch"', 'engine = "tensorflow"'))
    assert "TensorFlow" in refused(branch, 13)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words", "shown"),
    [
        (["--pdb"], "p sorted(gradients)[0], len(data), batch.index\nc\n", "('0.weight', 5, 9)"),
        (
            ["--pdb", "--before"],
            "p gradients, optimizer.state_dict()['state'][0]['step']",
            "tensor(9.)",
        ),
    ],
)
def test_the_debugger_has_the_step_at_hand(
    train: Train, flags: list[str], words: str, shown: str
) -> None:
    run = train(IMAGES, **JOB, bitwise=True).run_dir
    command = [
        sys.executable,
        "-m",
        "allranks.cli.main",
        "replay",
        str(run),
        "--step",
        "10",
        *flags,
    ]
    ended = subprocess.run(command, input=words, capture_output=True, text=True, check=False)
    assert shown in ended.stdout, ended
    goes_on = words.endswith("c\n")
    assert ended.returncode == (0 if goes_on else 1)
    assert ("equal: every one has" in ended.stdout) == goes_on
    assert ("left the debugger" in ended.stderr) != goes_on


def test_a_saved_step_replaces_no_file(train: Train, tmp_path: Path) -> None:
    run, file = train(IMAGES, **{**JOB, "steps": 3}).run_dir, tmp_path / "mine.py"
    file.write_text("mine")
    for path, problem in [(file, "it exists"), (tmp_path / "no" / "s.py", "no such folder")]:
        with pytest.raises(RequestError, match=problem):
            plan_replay(ReplayRequest(run, 2, look=f"save:{path}"))
    assert file.read_text() == "mine"


WITH_UNUSED = """

class WithUnused(Images):
    def model(self):
        model = super().model()
        model.unused = nn.Parameter(torch.ones(2))
        return model
"""


@pytest.mark.slow
def test_a_saved_step_runs_with_torch_alone(train: Train, host: Host, tmp_path: Path) -> None:
    """BatchNorm, keyed dropout, an uneven batch and an unused weight; what is changed is told.

    The path of the program is text, and no part of the script.
    """
    folder, file = tmp_path / 'a""" + str(print("INJECTED")) + r"""\\x{é}', tmp_path / "s.py"
    folder.mkdir()
    text = (TASKS / "contract_tasks.py").read_text() + WITH_UNUSED
    (folder / "copied.py").write_text(text)
    program = f"{folder}/copied.py:WithUnused"
    run = train(program, **JOB, bitwise=True, strategy="zero1", ranks=2).run_dir
    words = ("replay", str(run), "--step", "10", "--save-step", str(file))
    assert host.launch(tmp_path, *words).wait() == 0
    assert "allranks." not in file.read_text().replace("`allranks replay", "")
    alone = [sys.executable, "-I", str(file)]
    ended = subprocess.run(alone, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "9 of 9 gradients have the bits" in ended.stdout, ended
    assert "INJECTED" not in ended.stdout.splitlines()
    file.write_text(file.read_text().replace("total += tensor", "total += 1.01 * tensor"))
    assert subprocess.run(alone, capture_output=True, check=False).returncode == 1


NOTED = """
import hashlib, json
from pathlib import Path
from allranks.training.callback import Callback
from contract_tasks import Images


class Noted(Images):
    def callbacks(self):
        return [Notes()]


class Notes(Callback):
    def on_start(self, trainer):
        self.file = Path(trainer.job.run_dir, f"passes-{trainer.comm.rank}.jsonl").open("a")
        for name, parameter in trainer.model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self.note(trainer, name, gradient))

    def note(self, trainer, name, gradient):
        content = hashlib.sha256((gradient + 0).contiguous().numpy().data).hexdigest()
        row = {"step": trainer.progress.batch_index + 1, "name": name, "sha256": content}
        self.file.write(json.dumps(row) + chr(10))

    def on_end(self, trainer):
        self.file.close()
"""


@pytest.mark.slow
def test_one_shard_of_a_step_has_the_gradients_that_its_rank_computed(
    train: Train, host: Host, tmp_path: Path
) -> None:
    """Shard 5 of 8 is the second pass of rank 1 of 2. The short batch of step 10 has no shard 7."""

    def saved(step: int, file: Path, *flags: str) -> Launch:
        words = ("replay", str(run), "--step", str(step), "--save-step", str(file), *flags)
        return host.launch(tmp_path, *words)

    program = tmp_path / "noted.py"
    program.write_text(NOTED)
    run = train(f"{program}:Noted", **JOB, bitwise=True, strategy="ddp", ranks=2).run_dir
    alone, whole = tmp_path / "alone.py", tmp_path / "whole.py"
    launch = saved(9, alone, "--only-shard", "5")
    assert launch.wait() == 0 and "of step 9 shard 5 alone: its gradients" in launch.out, launch.err
    assert saved(9, whole).wait() == 0
    assert alone.stat().st_size < whole.stat().st_size
    words = [sys.executable, "-I", str(alone)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "8 of 8 gradients have the bits" in ended.stdout, ended
    assert "step 9, shard 5 alone," in ended.stdout
    (line,) = (row for row in alone.read_text().splitlines() if row.startswith("DIGESTS = "))
    for name, content in ast.literal_eval(line.removeprefix("DIGESTS = ")).items():
        rows = read_rows(run / "passes-1.jsonl")
        passes = [r["sha256"] for r in rows if (r["step"], r["name"]) == (9, name)]
        assert len(passes) == 4 and passes[1] == content
    for flags, problem in [(("10", "7"), "no sample"), (("9", "8"), "found: 8 shards")]:
        launch = saved(int(flags[0]), tmp_path / "none.py", "--only-shard", flags[1])
        assert launch.wait() == 2 and problem in launch.err
        assert not (tmp_path / "none.py").exists()


def test_a_shard_that_is_no_pass_is_refused(train: Train) -> None:
    run = train(IMAGES, **JOB, bitwise=True).run_dir
    with pytest.raises(RequestError, match="nothing to look with"):
        plan_replay(ReplayRequest(run, 9, only_shard=1))
    assert plan_replay(ReplayRequest(run, 9, look="pdb:after", only_shard=1)).job.only_shard == 1
    run = train(IMAGES, **JOB).run_dir
    with pytest.raises(RequestError, match="without --bitwise"):
        plan_replay(ReplayRequest(run, 9, look="pdb:after", only_shard=1))

"""Going on: from where, with what changed, and what is refused with the folder left as it was."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint.folder import committed
from allranks.checkpoint.format import read_manifest, write_manifest
from allranks.cli.display.progress import in_sentences
from allranks.errors import PlaceError, ProgramError, RequestError
from allranks.job.config import resolve
from allranks.job.run_folder import JsonLines, rank_events_path, read_events, read_rows
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.same_program import SamePrograms
from allranks.launcher.start import Result, run_job
from conftest import Train
from flipping import flip_bit

TASK = "resume_tasks:Rates"
PROGRAM = """
from resume_tasks import Rates


class Mine(Rates):
    pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Three steps of nine, on two ranks under `bitwise`, with a checkpoint after each."""
    path = tmp_path_factory.mktemp("half") / "half"
    flags = {"ranks": 2, "bitwise": True, "checkpoint_every": 1, "steps": 3}
    return run_job(resolve(TASK, {**flags, "run_dir": str(path)}), server)


@pytest.fixture
def half(trained: Result, folder: Path) -> Result:
    """That run, as a folder of this test's own: a run folder may be copied."""
    path = folder / "half"
    shutil.copytree(trained.run_dir, path)
    return Result(path, {**trained.summary, "run_dir": str(path)})


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return {}


@pytest.fixture
def wanted(train: Train, known: dict[str, Any]) -> str:
    """The digest of nine steps without a break."""
    if "digest" not in known:
        whole = train(TASK, run_dir="whole", bitwise=True, steps=9)
        known["digest"] = whole.summary["weights_sha256"]
        shutil.rmtree("whole")
    return str(known["digest"])


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below, to the byte; not what Python compiles of a program beside it."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def refuse(train: Train, folder: Path, program: str, *settings: str, **flags: Any) -> RequestError:
    """The refusal, in four parts; nothing below `folder` is other than before."""
    before = contents(folder)
    with pytest.raises(RequestError) as refused:
        train(program, *settings, **flags)
    assert refused.value.exit_code == 2
    assert all(refused.value.to_data().values())
    after = contents(folder)
    assert [name for name in before | after if before.get(name) != after.get(name)] == []
    return refused.value


def events(run: Path | str, name: str) -> list[dict[str, Any]]:
    return [row for row in read_events(Path(run)) if row["event"] == name]


def job_of(run: Path | str) -> dict[str, Any]:
    return tomllib.loads((Path(run) / "job.toml").read_text())


# --- from where -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_in_place_with_nothing_but_the_folder(train: Train, half: Result, wanted: str) -> None:
    found = train("", run_dir="half", steps=9)
    assert found.run_dir == half.run_dir
    assert found.summary["weights_sha256"] == wanted
    assert found.summary["resumed_from_step"] == 3
    job = job_of("half")
    assert (job["program"], job["steps"], job["ranks"], job["bitwise"]) == (TASK, 9, 2, True)
    assert job["source"]["steps"] == "command line"
    assert job["source"]["bitwise"] == "run half"
    assert job["source"]["seed"] == "default", "nobody gave it"
    assert "task.lr" not in job["source"]
    assert [row["changes"] for row in events("half", "started")] == [{}, {"steps": [3, 9]}]


@pytest.mark.slow
def test_a_branch_from_a_run(train: Train, folder: Path, half: Result, wanted: str) -> None:
    before = contents(half.run_dir)
    found = train("", run_dir="branch", resume="half", steps=9, ranks=3)
    assert found.summary["weights_sha256"] == wanted
    assert contents(half.run_dir) == before, "what is branched from is only read"
    assert job_of("branch")["resume"] == str(folder / "half")
    assert [row["step"] for row in read_rows(Path("branch/metrics.jsonl"))] == list(range(3, 9))
    (started,), (resumed,) = events("branch", "started"), events("branch", "resumed")
    assert started["changes"] == {"ranks": [2, 3], "steps": [3, 9]}
    assert (resumed["step"], resumed["ranks_were"]) == (3, 2)
    assert Path(resumed["path"]) == half.run_dir / "checkpoints" / "step-00000003"


@pytest.mark.slow
def test_a_branch_that_was_killed_goes_on_by_itself(
    train: Train, half: Result, wanted: str
) -> None:
    """In place, from its own checkpoint if it has one and from where it branched if not."""
    for fault, start in (("kill@step=3", 3), ("kill@at=save:prune,step=5", 5)):
        run = f"branch-{start}"
        flags = {"checkpoint_every": 5, "inject": fault}
        with pytest.raises(ProgramError):
            train("", run_dir=run, resume="half", steps=9, **flags)
        found = train("", run_dir=run)
        assert found.summary["resumed_from_step"] == start
        assert found.summary["weights_sha256"] == wanted


def test_from_one_step(train: Train, half: Result, wanted: str) -> None:
    found = train("", run_dir="branch", resume="half/checkpoints/step-00000002", steps=9)
    assert found.summary["weights_sha256"] == wanted
    assert found.summary["resumed_from_step"] == 2


@pytest.mark.cases("name", ["the best one"], exhaustive=["step-00000002"])
def test_from_a_copy_without_its_run(
    name: str, train: Train, folder: Path, half: Result, wanted: str
) -> None:
    """The checkpoint remembers the job; a job file that lies about near it has nothing to say."""
    (folder / "there").mkdir()
    shutil.copytree("half/checkpoints/step-00000002", folder / "there" / name)
    shutil.rmtree("half")
    (folder / "job.toml").write_text('program = "digits"\nseed = 5\n')
    found = train("", run_dir="branch", resume=f"there/{name}", steps=9)
    assert found.summary["weights_sha256"] == wanted
    assert job_of("branch")["program"] == TASK


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_over(train: Train, wanted: str) -> None:
    flags = {"bitwise": True, "checkpoint_every": 5}
    with pytest.raises(ProgramError):
        train(TASK, run_dir="run", ranks=2, steps=9, inject="kill@rank=1,step=4", **flags)
    found = train("", run_dir="run")
    assert found.summary["weights_sha256"] == wanted
    assert found.summary["resumed_from_step"] is None
    assert [row["step"] for row in read_rows(Path("run/metrics.jsonl"))] == list(range(9))
    assert "inject" not in job_of("run") or job_of("run")["inject"] == ""


def test_a_finished_run_asked_again_reports_the_same(train: Train, half: Result) -> None:
    weights = (half.run_dir / "weights.safetensors").read_bytes()
    metrics = list(read_rows(half.run_dir / "metrics.jsonl"))
    kept = contents(half.run_dir / "checkpoints")
    job = (half.run_dir / "job.toml").read_bytes()
    found = train("", run_dir="half", ranks=1, keep=9)
    assert (half.run_dir / "job.toml").read_bytes() == job, "it is of the job that trained"
    same = ("weights_sha256", "train_loss", "eval", "steps", "run_dir")
    assert {n: found.summary[n] for n in same} == {n: half.summary[n] for n in same}
    assert found.summary["samples_per_s"] is None, "nothing was trained"
    assert "nothing was trained: the run had ended after step 3" in in_sentences(found.summary)
    assert (half.run_dir / "weights.safetensors").read_bytes() == weights
    assert list(read_rows(half.run_dir / "metrics.jsonl")) == metrics
    assert contents(half.run_dir / "checkpoints") == kept


@pytest.mark.slow
def test_fewer_steps_than_were_made_are_refused(train: Train, folder: Path, half: Result) -> None:
    """In place, from a branch, in steps and in epochs; nothing of the run is changed."""
    before = contents(half.run_dir)
    refusal = refuse(train, folder, "", run_dir="half", steps=2)
    assert refusal.asked == f"--steps 2, from {half.run_dir}"
    assert refusal.found == "its newest checkpoint, after step 3"
    assert contents(half.run_dir) == before
    refusal = refuse(train, folder, "", run_dir="branch", resume="half", steps=1)
    assert (refusal.asked, Path("branch").exists()) == (f"--steps 1, from {folder / 'half'}", False)
    train("", run_dir="half", steps=6)
    refusal = refuse(train, folder, "", "epochs=1", run_dir="half", steps=None)
    assert refusal.asked.startswith("epochs that are 5 steps, from ")


def test_a_finished_run_without_checkpoints_is_refused(train: Train, folder: Path) -> None:
    train(TASK, run_dir="run", steps=2)
    refusal = refuse(train, folder, "", run_dir="run", steps=4)
    assert refusal.found == "a run that kept no checkpoint to go on from"


def test_never_refuses_a_folder_that_is_there(train: Train, folder: Path, half: Result) -> None:
    refusal = refuse(train, folder, TASK, run_dir="half", resume="never", steps=9)
    assert refusal.asked == f"--run-dir {half.run_dir}"
    fresh = train(TASK, run_dir="fresh", resume="never", steps=1)
    assert fresh.summary["resumed_from_step"] is None


def test_epochs_go_before_the_steps_of_the_run(train: Train, half: Result) -> None:
    """`--epochs` on the command line is what is asked now; `steps` was asked then."""
    found = train("", "epochs=1", run_dir="half", steps=None)
    assert len(list(read_rows(found.run_dir / "metrics.jsonl"))) == 5


# --- what may be said anew ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cases("program", ["resume_tasks:Scheduled"], exhaustive=[TASK])
def test_another_rate_takes_effect_and_is_recorded(program: str, train: Train) -> None:
    flags = {"ranks": 2, "checkpoint_every": 1}
    train(program, "lr=0.01", run_dir="run", steps=3, **flags)
    train("", "lr=0.5", run_dir="run", steps=5)
    rates = [row["learning_rate"] for row in read_rows(Path("run/metrics.jsonl"))]
    factor = [1 / (1 + n) if "Scheduled" in program else 1.0 for n in range(5)]
    assert rates == pytest.approx(
        [r * f for r, f in zip([0.01] * 3 + [0.5] * 2, factor, strict=True)]
    )
    assert events("run", "started")[-1]["changes"]["task.lr"] == [0.01, 0.5]
    assert events("run", "resumed")[-1]["changes"]["task.lr"] == [0.01, 0.5]
    assert job_of("run")["task"]["lr"] == 0.5


@pytest.mark.slow
def test_another_rate_keeps_the_moments(train: Train) -> None:
    """A rate of nothing stops the training where it is: neither moments nor weights begin anew."""
    train(TASK, run_dir="run", steps=3, checkpoint_every=1)
    frozen = train("", "lr=0.0", run_dir="a", resume="run", steps=5)
    assert frozen.summary["weights_sha256"] == train("", run_dir="run").summary["weights_sha256"]
    train("", "lr=0.0", run_dir="b", resume="run", steps=4, checkpoint_every=1)
    with_moments = train("", "lr=0.01", run_dir="c", resume="b/checkpoints/step-00000004", steps=5)
    fresh = train("", "lr=0.01", "momentum=0.0", run_dir="d", resume="b", steps=5)
    assert with_moments.summary["weights_sha256"] != fresh.summary["weights_sha256"]


@pytest.mark.slow
def test_more_epochs_do_not_reset_what_an_optimizer_keeps_in_its_groups(train: Train) -> None:
    """Optimizers that need no schedule count their steps there; only what was changed changes."""
    flags: dict[str, Any] = {"bitwise": True, "checkpoint_every": 100}
    wanted = train("resume_tasks:OddImages", "epochs=2", bitwise=True)
    train("resume_tasks:OddImages", "epochs=1", run_dir="run", **flags)
    found = train("", "epochs=2", run_dir="run")
    assert found.summary["weights_sha256"] == wanted.summary["weights_sha256"]


@pytest.mark.slow
def test_what_is_free_is_recorded(train: Train, half: Result, wanted: str) -> None:
    flags: dict[str, Any] = {
        "ranks": 3,
        "loader_workers": 1,
        "checkpoint_every": 4,
        "keep": 1,
        "best": "min:loss",
        "max_restarts": 1,
        "hang_timeout": 60.0,
        "time_limit": 500.0,
        "on_bad_step": "warn",
        "spike": 1e9,
        "verify_every": 2,
        "steps": 9,
    }
    found = train("", run_dir="half", **flags)
    changes = events("half", "started")[-1]["changes"]
    default = dataclasses.asdict(resolve(TASK, {}).job)
    was = {**default, "ranks": 2, "checkpoint_every": 1, "steps": 3}
    assert changes == {name: [was[name], now] for name, now in flags.items()}
    assert events("half", "resumed")[-1]["changes"] == changes
    assert found.summary["weights_sha256"] == wanted


def test_a_micro_batch_is_free(train: Train) -> None:
    train(TASK, run_dir="run", precision="fp64", steps=3, checkpoint_every=1)
    train("", run_dir="run", micro_batch=5, steps=5)
    assert events("run", "resumed")[-1]["changes"]["micro_batch"] == [None, 5]


def test_a_changed_program_file_is_noted(train: Train, folder: Path) -> None:
    (folder / "mine.py").write_text(PROGRAM)
    train("mine.py", run_dir="run", steps=2, checkpoint_every=1)
    train("", run_dir="run", steps=3)
    assert events("run", "resumed")[-1]["differs"] == {}
    (folder / "mine.py").write_text(PROGRAM + "\n# another line\n")
    train(str(folder / "mine.py"), run_dir="run", steps=4)  # the same file by another name
    (was, now) = events("run", "resumed")[-1]["differs"]["program_sha256"]
    assert was != now and len(now) == 64


EDITED = """
from pathlib import Path

from resume_tasks import Rates

{more}

class Mine(Rates):
    def train_data(self):
        found = super().train_data()
        file = Path({edits!r})
        file.write_text(file.read_text() + "# edited while the job runs\\n")
        return found
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("edits", ["mine.py", "helping.py"])
def test_a_checkpoint_tells_of_the_program_that_was_loaded(
    train: Train, folder: Path, edits: str
) -> None:
    """It was edited before the first save; going on with the edited one is noted, by its name."""
    (folder / "helping.py").write_text("VALUE = 1\n")
    text = EDITED.format(more="import helping  # noqa: F401", edits=str(folder / edits))
    (folder / "mine.py").write_text(text)
    loaded = {name: (folder / name).read_bytes() for name in ("mine.py", "helping.py")}
    result = train("mine.py", run_dir="run", steps=2, checkpoint_every=1)
    facts = read_manifest(committed(result.run_dir / "checkpoints")[0]).facts
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in loaded.items()}
    assert facts["program_sha256"] == digests["mine.py"]
    assert facts["modules_sha256"]["helping"] == digests["helping.py"]
    train("", run_dir="run", steps=3)
    changed = {"mine.py": "program_sha256", "helping.py": "module helping"}[edits]
    differs = events("run", "resumed")[-1]["differs"]
    assert list(differs) == [changed] and differs[changed][0] == digests[edits]


def test_a_restart_with_an_edited_program_is_told(train: Train, folder: Path) -> None:
    """There is no checkpoint yet that could tell of it."""
    (folder / "mine.py").write_text(EDITED.format(more="", edits=str(folder / "mine.py")))
    was = hashlib.sha256((folder / "mine.py").read_bytes()).hexdigest()
    train("mine.py", run_dir="run", steps=3, max_restarts=1, inject="fail@step=1")
    (told,) = events("run", "program_changed")
    assert (
        list(told["differs"]) == ["program_sha256"] and told["differs"]["program_sha256"][0] == was
    )


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("program", ["mine.py", "mine:Mine"])
def test_ranks_that_load_other_files_end_the_job(
    train: Train, folder: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nodes do on which a module of the user's, or what `module:Class` names, is another."""
    for name in ("0", "1"):
        (folder / name).mkdir()
        (folder / name / "helping.py").write_text(f"VALUE = {name}\n")
    where = f"sys.path.insert(0, {str(folder)!r} + '/' + os.environ.get('RANK', '0'))"
    more = f"import os, sys\n{where}\nimport helping\n"
    (folder / "mine.py").write_text(f"{more}{PROGRAM}")
    with pytest.raises(PlaceError) as refused:
        train(program, run_dir="run", ranks=2, steps=200)
    assert "  module helping: rank 0 has " in str(refused.value)
    assert events("run", "failed")[-1]["report"] == str(refused.value)


def test_a_job_that_was_done_when_it_was_seen_is_told_at_its_end(tmp_path: Path) -> None:
    """What a look in the midst of a job raises may come when the job is done."""
    with JsonLines(tmp_path / "events.jsonl") as heard:
        for rank in (0, 1):
            path = rank_events_path(tmp_path, rank)
            path.parent.mkdir(exist_ok=True)
            with JsonLines(path) as said:
                said.event("ready", machine={"program_sha256": f"{rank}"})
        programs = SamePrograms(tmp_path, heard)
        for at_once in (False, True):
            with pytest.raises(PlaceError, match="rank 0 has 0, rank 1 has 1"):
                programs.look(0, ["", ""], at_once)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.slow(but=4)
@pytest.mark.thinned(
    1,
    ("where", ["in place", "a branch"]),
    (
        "program,settings,flags,asked,found",
        [
            ("", (), {"seed": 1}, "--seed 1", "seed = 0"),
            ("", (), {"precision": "fp64"}, "--precision fp64", "precision = fp32"),
            ("", (), {"bitwise": False}, "--bitwise False", "bitwise = True"),
            (
                "resume_tasks:RatesAdam",
                (),
                {},
                "PROGRAM resume_tasks:RatesAdam",
                f"program = {TASK}",
            ),
            ("digits", (), {}, "PROGRAM digits", f"program = {TASK}"),
            ("", ("batch_size=12",), {}, "--set batch_size=12", "batch_size = 24"),
            ("", ("shards=4",), {}, "--set shards=4", "shards = 8"),
            ("", ("last_batch=drop",), {}, "--set last_batch=drop", "last_batch = keep"),
            ("", (), {"strategy": "independent", "bitwise": False}, "--bitwise", "bitwise = True"),
            ("", (), {"device": "cuda"}, "--device cuda", "device = cpu"),
            ("", ("hidden=9",), {}, "to resume from a checkpoint", "other tensors: 0.bias is (9,)"),
            ("", ("nothing=9",), {}, "--set nothing=9", "no field 'nothing'"),
        ],
    ),
)
def test_another_job_is_refused(
    where: str,
    program: str,
    settings: tuple[str, ...],
    flags: dict[str, Any],
    asked: str,
    found: str,
    train: Train,
    folder: Path,
    half: Result,
) -> None:
    """What is found by the ranks too leaves the folder of a good run as it was, to the byte."""
    there = {"run_dir": "half"} if where == "in place" else {"run_dir": "new", "resume": "half"}
    refusal = refuse(train, folder, program, *settings, steps=9, **there, **flags)
    assert refusal.asked.startswith(asked)
    assert refusal.found.startswith(found)


@pytest.mark.slow
def test_a_strategy_with_another_state_is_refused(train: Train, folder: Path) -> None:
    train(TASK, run_dir="run", ranks=2, steps=2, checkpoint_every=1)
    refusal = refuse(train, folder, "", run_dir="run", strategy="independent", steps=4)
    assert refusal.asked.startswith("--strategy independent")
    train(TASK, run_dir="apart", ranks=2, strategy="independent", steps=2, checkpoint_every=1)
    refusal = refuse(train, folder, "", run_dir="apart", strategy="ddp", steps=4)
    assert refusal.do == "resume with --strategy independent"


@pytest.mark.slow
def test_what_is_refused_in_the_first_step_is_a_bad_request_here_too(
    train: Train, tmp_path: Path
) -> None:
    """No update was made since the start, whatever the run before has made."""
    program, run_dir = "resume_tasks:Unjudged", tmp_path / "another"
    before = train(program, strategy="single", steps=2, checkpoint_every=2)
    asked = {"steps": 4, "resume": str(before.run_dir), "run_dir": str(run_dir)}
    with pytest.raises(RequestError, match="each rank takes as many heads"):
        train(program, strategy="context", ranks=3, **asked)
    assert not run_dir.exists()


def test_another_optimizer_in_the_same_program_is_refused(train: Train, folder: Path) -> None:
    """The file was changed: its rate would be found in the checkpoint, its moments would not."""
    (folder / "mine.py").write_text(PROGRAM)
    train("mine.py", run_dir="run", steps=2, checkpoint_every=1)
    (folder / "mine.py").write_text(PROGRAM.replace("Rates", "RatesAdam"))
    refusal = refuse(train, folder, "", run_dir="run", steps=4)
    assert refusal.asked == "to resume from a checkpoint"
    assert "SGD" in refusal.found and "AdamW" in refusal.found


def test_other_groups_of_an_optimizer_are_refused(train: Train, folder: Path) -> None:
    train("resume_tasks:Grouped", run_dir="run", steps=2, checkpoint_every=1)
    refusal = refuse(train, folder, "", "swapped=true", run_dir="run", steps=4)
    assert refusal.found.startswith("other groups of parameters: ")


def reseal(folder: Path, **changes: Any) -> None:
    """A checkpoint whose manifest says something else, and is sealed all the same."""
    manifest = read_manifest(folder)
    write_manifest(folder, dataclasses.replace(manifest, **changes))


MACHINE = {"torch": "1.13.0", "cpu_capability": "AVX2000", "threads": 7}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", MACHINE)
def test_another_machine_is_refused_under_bitwise(
    name: str, train: Train, folder: Path, half: Result
) -> None:
    step = half.run_dir / "checkpoints" / "step-00000003"
    reseal(step, facts={**read_manifest(step).facts, name: MACHINE[name]})
    refusal = refuse(train, folder, "", run_dir="half", steps=4)
    assert refusal.asked == "to resume with --bitwise"
    assert f"made with {MACHINE[name]}" in refusal.found


def test_another_machine_is_recorded_where_it_is_not_refused(train: Train) -> None:
    train(TASK, run_dir="free", steps=2, checkpoint_every=1)
    step = Path("free/checkpoints/step-00000002")
    reseal(step, facts={**read_manifest(step).facts, **MACHINE})
    train("", run_dir="free", steps=3)
    differs = events("free", "resumed")[-1]["differs"]
    assert {name: differs[name][0] for name in MACHINE} == MACHINE


@pytest.mark.parametrize(
    "path", ["nowhere", "empty", "file", "half/logs", "half/checkpoints/step-00000009"]
)
def test_a_path_that_is_nothing_is_refused(
    path: str, train: Train, folder: Path, half: Result
) -> None:
    (folder / "empty").mkdir()
    (folder / "file").write_text("no checkpoint")
    refusal = refuse(train, folder, TASK, run_dir="new", resume=path)
    assert refusal.asked == f"--resume {path}"


def damage(run: Path, *steps: int) -> None:
    for step in steps:
        folder = run / "checkpoints" / f"step-{step:08d}"
        flip_bit(next(iter(sorted(folder.glob("rank-*")))), -1)


def test_a_path_with_nothing_but_damaged_checkpoints_is_refused(
    train: Train, folder: Path, half: Result
) -> None:
    damage(half.run_dir, 1, 2, 3)
    refusal = refuse(train, folder, "", run_dir="new", resume="half", steps=9)
    assert refusal.found == "no checkpoint in it whose digests hold"
    refusal = refuse(
        train, folder, "", run_dir="new", resume="half/checkpoints/step-00000002", steps=9
    )
    assert refusal.found == "no checkpoint in it whose digests hold"


# --- a damaged checkpoint -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a tensor", "the manifest"])
def test_the_one_before_a_damaged_one_is_loaded(
    what: str, train: Train, half: Result, wanted: str
) -> None:
    step = half.run_dir / "checkpoints" / "step-00000003"
    if what == "a tensor":
        damage(half.run_dir, 3)
    else:
        flip_bit(step / "manifest.json", 40)
    found = train("", run_dir="half", ranks=3, steps=9)
    assert found.summary["weights_sha256"] == wanted
    assert found.summary["resumed_from_step"] == 2
    (skipped,) = [row for row in events("half", "checkpoint_skipped") if row["rank"] == 0]
    assert skipped["step"] == 3 and Path(skipped["path"]) == step
    assert skipped["problems"] and Path(skipped["set_aside"]).name == "step-00000003.bad-1"
    assert (half.run_dir / "checkpoints" / "step-00000003.bad-1").is_dir()
    rows = [row["step"] for row in read_rows(half.run_dir / "metrics.jsonl")]
    assert rows == list(range(9)), "the step that was lost is done again, and told once"


def test_a_damaged_one_of_another_run_is_passed_over_and_left_there(
    train: Train, half: Result, wanted: str
) -> None:
    damage(half.run_dir, 3)
    before = contents(half.run_dir)
    found = train("", run_dir="new", resume="half", steps=9)
    assert found.summary["weights_sha256"] == wanted
    assert found.summary["resumed_from_step"] == 2
    assert contents(half.run_dir) == before
    assert events("new", "checkpoint_skipped")[0]["set_aside"] is None


def test_all_of_its_own_are_damaged_and_it_starts_over(
    train: Train, half: Result, wanted: str
) -> None:
    """In place nothing else is asked for than to go on: all three are named, and kept aside."""
    damage(half.run_dir, 1, 2, 3)
    found = train("", run_dir="half", steps=9)
    assert found.summary["weights_sha256"] == wanted
    assert found.summary["resumed_from_step"] is None
    assert len(events("half", "checkpoint_skipped")) == 3
    assert committed(half.run_dir / "checkpoints")[0].name == "step-00000009"


# --- at the door ----------------------------------------------------------------------------------


def test_a_secret_is_asked_for_again_and_not_told(train: Train, folder: Path) -> None:
    secret = "hunter2-of-the-project"
    train(TASK, f"api_key={secret}", run_dir="run", steps=2, checkpoint_every=1)
    assert job_of("run")["task"]["api_key"] == "[redacted]"
    refusal = refuse(train, folder, "", run_dir="run", steps=4)
    assert "api_key" in refusal.asked and "--set api_key=" in refusal.do
    train("", f"api_key={secret}", run_dir="run", steps=4)
    train("", f"api_key={secret}-2", run_dir="new", resume="run", steps=5)
    for path in folder.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path


def test_a_secret_that_was_none_before_is_not_told_either(train: Train, folder: Path) -> None:
    secret = "hunter2-of-the-project"
    train(TASK, run_dir="run", steps=2, checkpoint_every=1)
    train("", f"api_key={secret}", run_dir="run", steps=4)
    for path in folder.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path


def test_a_run_folder_elsewhere_goes_on_by_its_absolute_name(
    train: Train, folder: Path, half: Result, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole folder was moved, and the command is given somewhere else."""
    os.rename("half", "moved run")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    found = train("", run_dir="../moved run", steps=9)
    assert found.summary["weights_sha256"] == wanted
    assert json.loads(json.dumps(found.summary))["run_dir"] == str(folder / "moved run")

"""`allranks certify` and `verify`: a file that says how a run was made, and steps of it again."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from allranks.checkpoint.folder import committed, step_of
from allranks.cli.main import cli
from allranks.errors import EXIT_DIFFERENCE_FOUND, RequestError
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import Result
from allranks.tools.certificate import Certificate, certify, read_certificate
from allranks.tools.verify import Verified, VerifyRequest, drawn, verify
from allranks.training.record.digests import chain_of
from conftest import TASKS
from test_replay import flip

Train = Callable[..., Result]
Made = tuple[Path, Path]
IMAGES = "contract_tasks:Images"
JOB = {"digest_every": 3, "checkpoint_every": 4, "steps": 12, "first_check": "off"}
KILLED = {"inject": "kill@rank=1,step=6", "max_restarts": 1}


@pytest.fixture
def made(train: Train, tmp_path: Path) -> Made:
    """A run of one process, and its certificate."""
    run = train(IMAGES, **JOB, bitwise=True).run_dir
    return run, written(run, tmp_path)


def written(run: Path, folder: Path) -> Path:
    file = folder / "certificate.json"
    certify(run).write(file)
    return file


def again(server: ForkServer, file: Path, **more: Any) -> Verified:
    return verify(VerifyRequest(path=file, **more), server)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(RequestError) as error:
        call()
    assert "/replay " not in error.value.asked and all(error.value.to_data().values())
    return error.value.found


@pytest.mark.slow(but=1, most=2)
@pytest.mark.parametrize(
    ("strategy", "of_run", "ranks"), [("ddp", 2, 1), ("fsdp", 3, 2), ("zero1", 2, 3)]
)
def test_it_holds_on_any_number_of_ranks(
    server: ForkServer, train: Train, tmp_path: Path, strategy: str, of_run: int, ranks: int
) -> None:
    """After a kill and a restart; the run is read, and nothing in it changes."""
    run = train(IMAGES, strategy=strategy, ranks=of_run, bitwise=True, **JOB, **KILLED).run_dir
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = again(server, written(run, tmp_path), ranks=ranks, steps=9)
    assert result.holds and result.weights_hold
    assert [(s.start, s.rows) for s in result.stretches] == [(0, (3, 4)), (4, (6, 8)), (8, (9, 12))]
    assert {stretch.ranks for stretch in result.stretches} == {ranks}
    assert result.steps_made == 12 and "holds: 12 of 12 steps were made again (100.0%)" in str(
        result
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_each_changed_field_is_named(made: Made) -> None:
    """Every leaf of the file, one at a time."""
    file = made[1]
    data = json.loads(file.read_text())
    places = list(leaves(data))
    assert {path[0] for path in places} == set(data) and len(places) > 150
    for path in places:
        changed = copy.deepcopy(data)
        inside = changed
        for name in path[:-1]:
            inside = inside[name]
        inside[path[-1]] = other(inside[path[-1]])
        file.write_text(json.dumps(changed))
        message = refused(lambda: read_certificate(file))
        shown = path[1:] if path[0] == "seals" else path[:2] if path[0] == "digests" else path
        assert message.startswith(".".join(map(str, shown))), (path, message)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if not isinstance(value, (dict, list)):
        yield path
        return
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(item, (*path, name))


def other(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    return f"{value}." if isinstance(value, str) else value + 1


def test_a_row_that_was_left_out_is_named(made: Made) -> None:
    file = made[1]
    data = json.loads(file.read_text())
    for index, text in [(1, "digests.1: the chain breaks at the row of step 6"), (-1, "sha256")]:
        changed = copy.deepcopy(data)
        del changed["digests"][index]
        file.write_text(json.dumps(changed))
        assert refused(lambda: read_certificate(file)).startswith(text)


@pytest.mark.slow
def test_a_checkpoint_with_other_weights_does_not_hold(server: ForkServer, made: Made) -> None:
    """Its own digests are those of what is in it."""
    run, file = made
    folder = next(f for f in committed(run / "checkpoints") if step_of(f) == 8)
    flip(folder, "common/model/9.weight")
    result = again(server, file, ranks=2)
    fails = [stretch for stretch in result.stretches if stretch.differs]
    assert [(s.start, s.differs) for s in fails] == [(8, (8, ("weights",)))]
    assert not result.holds and result.weights_hold is False
    assert "FAIL: the checkpoint itself has other weights" in str(result)


@pytest.mark.slow
def test_forged_digests_do_not_hold(server: ForkServer, made: Made) -> None:
    """A chain and seals that are right, over a row that is not; without a checkpoint."""
    run, file = made
    certificate = read_certificate(file)
    shutil.rmtree(run)
    right = certificate.digests[2]["optimizer"]
    for name in ("optimizer", "gradients"):  # a row without them
        value, certificate.digests[2][name] = certificate.digests[2][name], None
        rewrite(certificate, file)
        (stretch,) = again(server, file, steps=1, within=6).stretches
        expected = (6, ("optimizer",)) if name == "optimizer" else None  # as one on request
        assert stretch.rows[-1] < 6 or stretch.differs == expected
        certificate.digests[2][name] = value
    certificate.digests[2]["optimizer"] = f"{int(right, 16) ^ 1:016x}"
    rewrite(certificate, file)
    result = again(server, file, steps=9, ranks=2)
    (stretch,) = result.stretches
    assert stretch.ranks == 2  # as `ddp`: the run was made by one process
    assert stretch.differs == (6, ("optimizer",)) and not result.holds and result.weights_hold
    assert "no checkpoint of the run is there" in result.notes[0]
    door = CliRunner().invoke(cli, ["verify", str(file), "--within", "3"])
    assert door.exit_code == 0, door.output  # up to step 3 all is right
    assert "holds: 3 of 12 steps were made again (25.0%)" in door.output
    door = CliRunner().invoke(cli, ["verify", str(file), "--json"])
    assert door.exit_code == EXIT_DIFFERENCE_FOUND and not json.loads(door.output)["holds"]


def rewrite(certificate: Certificate, file: Path) -> None:
    """Write it with a chain and seals that are right."""
    chain = ""
    for row in certificate.digests:
        if isinstance(row, dict):
            row["chain"] = chain = chain_of(row, chain)
    file.write_text(str(certificate))


def test_what_certify_does_not_write_is_refused(made: Made) -> None:
    """Right seals over nothing to compare, or over values of other types."""
    file = made[1]
    text = file.read_text()

    def changed(section: str, name: Any, value: Any) -> str:
        file.write_text(text)
        certificate = read_certificate(file)
        inside = getattr(certificate, section)
        if section == "digests":
            inside = inside[2]
        if value is ...:
            del inside[name]
        else:
            inside[name] = value
        rewrite(certificate, file)
        return refused(lambda: read_certificate(file))

    for name in ("weights", "optimizer", "samples", "loss"):
        assert changed("digests", name, ...) == f"digests.2.{name}: not there"
    assert changed("digests", "weights", None).startswith("digests.2.weights: None is of another")
    for value in ("x", 16.5, True):
        assert changed("digests", "step", value).startswith("digests.2.step: ")
    assert changed("digests", "step", 4) == "digests: no rows of one step after the other"
    assert changed("result", "run", 5).startswith("result.run: 5 is of another type")
    assert changed("result", "steps", "forty").startswith("result.steps: ")
    assert changed("result", "steps", 4) == "result.steps: 4, and a row of step 12"
    assert changed("job", "engine", "tensorflow").startswith("job.engine: 'tensorflow', whose")
    assert changed("job", "strategy", ...) == "job.strategy: not there"
    assert changed("program", "name", "digits") == "program.name: not the program of the job"
    file.write_text(text)
    sections = vars(read_certificate(file))
    nothing: dict[str, Any] = {"machine": {}, "data": [], "program": 3, "result": {}}
    for name, value in nothing.items():
        file.write_text(str(Certificate(**{**sections, name: value})))
        assert refused(lambda: read_certificate(file)) == f"{name}: no fields"
    file.write_text(str(Certificate(**{**sections, "digests": []})))
    assert refused(lambda: read_certificate(file)).startswith("digests: no rows")


@pytest.mark.parametrize("form", ["{folder}/other.py", "{folder}/other.py:Plain", "other:Plain"])
def test_another_program_is_not_executed(
    server: ForkServer, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    file, trace = made[1], tmp_path / "trace"
    monkeypatch.chdir(tmp_path)
    Path("other.py").write_text(f"open({str(trace)!r}, 'x')")
    certificate, name = read_certificate(file), form.format(folder=tmp_path)
    certificate.program["name"] = certificate.job["program"] = name
    rewrite(certificate, file)
    assert "nothing of it was executed" in refused(lambda: again(server, file))
    Path("other.py").unlink()
    assert "is not a file here" in refused(lambda: again(server, file))
    assert not trace.exists()


def test_what_is_around_must_be_as_it_was(server: ForkServer, train: Train, tmp_path: Path) -> None:
    program = tmp_path / "edited.py"
    shutil.copy(TASKS / "contract_tasks.py", program)
    run = train(f"{program}:Plain", **{**JOB, "steps": 3}, bitwise=True).run_dir
    file = written(run, tmp_path)
    certificate = read_certificate(file)

    def with_other(section: str, name: str, value: Any) -> str:
        values = {**getattr(certificate, section), name: value}
        file.write_text(str(type(certificate)(**{**vars(certificate), section: values})))
        return refused(lambda: again(server, file))

    assert "cpu_capability is " in with_other("machine", "cpu_capability", "AVX2000")
    assert "here, 1.13.0 in the" in with_other("machine", "torch", "1.13.0")
    without = {n: v for n, v in certificate.machine.items() if n != "torch"}
    file.write_text(str(Certificate(**{**vars(certificate), "machine": without})))
    assert "here, None in the" in refused(lambda: again(server, file))
    digest = {**certificate.data["train_data"], "digest": "0"}
    assert with_other("data", "train_data", digest).startswith("train_data is kind ")
    file.write_text(str(certificate))
    program.write_text(program.read_text() + "\n# another line\n")
    assert f"{program} is " in refused(lambda: again(server, file))


def test_what_cannot_be_certified_is_refused(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no job.toml" in refused(lambda: certify(tmp_path))
    short = {**JOB, "steps": 4}
    assert "without --bitwise" in refused(lambda: certify(train(IMAGES, **short).run_dir))
    silent = train(IMAGES, **{**short, "digest_every": 0}, bitwise=True).run_dir
    with pytest.raises(RequestError, match="a run without digests") as error:
        certify(silent)
    assert error.value.do == "train with --digest-every 2"  # of 4 steps
    run = train(IMAGES, **short, bitwise=True).run_dir
    assert certify(run).result["steps"] == 4
    rows = (run / "digests.jsonl").read_text()
    (run / "digests.jsonl").write_text(rows.replace('"step": 3', '"step": 2'))
    assert "broken at step 2" in refused(lambda: certify(run))
    (run / "digests.jsonl").write_text(rows)
    train("", run_dir=str(run), steps=6)
    assert refused(lambda: certify(run)) == "steps: changed when it was resumed at 4"
    monkeypatch.setattr("allranks.tools.certificate.is_in_use", lambda path: True)
    assert refused(lambda: certify(run)) == "a run that is running"


def test_what_is_no_certificate_is_refused(made: Made, tmp_path: Path) -> None:
    run, file = made
    assert "No such file" in refused(lambda: read_certificate(tmp_path / "none"))
    data = json.loads(file.read_text())
    assert "File exists" in refused(lambda: certify(run).write(file))
    for text, message in [
        ("# no", "no JSON"),
        ("[]", "no certificate: it has no field"),
        (json.dumps({**data, "certificate": 2}), "certificate = 2: another format"),
        (json.dumps({**data, "digests": 3}), "TypeError"),
    ]:
        file.write_text(text)
        assert message in refused(lambda: read_certificate(file))
        assert CliRunner().invoke(cli, ["verify", str(file)]).exception is not None


def test_the_rows_are_drawn_all_over_the_run() -> None:
    rows = list(range(3, 303, 3))
    some = drawn(rows, 5, "chain")
    assert [(row - 3) // 60 for row in some] == [0, 1, 2, 3, 4]
    assert some == drawn(rows, 5, "chain") != drawn(rows, 5, "another")
    assert drawn(rows[:2], 5, "") == rows[:2]

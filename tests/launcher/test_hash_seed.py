"""One hash seed for all processes of a job: sets of texts have one order, run after run."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.errors import RequestError
from allranks.job.config import resolve
from allranks.job.run_folder import read_events
from allranks.launcher.processes.fork_server_client import (
    HASH_SEED,
    ForkServer,
    check_hash_seed,
    hash_seed,
)
from allranks.launcher.processes.process import Process
from allranks.launcher.start import run_job
from allranks.launcher.supervisor import supervise

NAMED = f"{Path(__file__).parents[1] / 'tasks' / 'set_tasks.py'}:Named"


def texts_in_a_set(path: str) -> int:
    """In a rank: the order of a set of texts, written to a file."""
    Path(path).write_text(" ".join({f"class {number}" for number in range(40)}))
    return 0


def order_in(server: ForkServer, folder: Path, name: str) -> str:
    target = f"{__name__}:texts_in_a_set"
    ended = supervise(server, [Process(0, target, str(folder / name), {}, folder / "log")])
    assert ended.exits[0].code == 0, (folder / "log").read_text()
    return (folder / name).read_text()


@pytest.mark.slow
def test_two_servers_give_a_set_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_seed: None
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with ForkServer(()) as one, ForkServer(()) as other:
        assert order_in(one, tmp_path, "one") == order_in(other, tmp_path, "other")


@pytest.fixture
def no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HASH_SEED, raising=False)


def test_the_users_own_is_respected_and_random_is_one_number(no_seed: None) -> None:
    assert hash_seed({}) == hash_seed({HASH_SEED: ""}) == "0"
    assert hash_seed({HASH_SEED: "7"}) == "7"
    assert hash_seed({HASH_SEED: "random"}).isdecimal()


def test_a_node_with_another_seed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("", "random", "7"):
        monkeypatch.setenv(HASH_SEED, given)
        check_hash_seed("7")
    with pytest.raises(RequestError, match="sets of texts would have another order"):
        check_hash_seed("0")


@pytest.mark.slow
def test_class_numbers_from_a_set_are_those_of_the_last_run(
    tmp_path: Path, no_seed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run has a fork server of its own, as each command has; the seed is in its record."""

    def train(name: str) -> str:
        flags = {"bitwise": True, "steps": 2, "ranks": 2, "run_dir": str(tmp_path / name)}
        return str(run_job(resolve(NAMED, flags)).summary["weights_sha256"])

    usual = train("one")
    assert train("two") == usual
    monkeypatch.setenv(HASH_SEED, "12")
    assert train("other") != usual
    for name, seed in (("one", "0"), ("other", "12")):
        started = next(e for e in read_events(tmp_path / name) if e["event"] == "started")
        assert started["environment"][HASH_SEED] == seed

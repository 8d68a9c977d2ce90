"""What looks like a secret, by its name or by itself;
and the three places where all of it passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.job.job_file import HIDDEN, redacted
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.scripts.plan import CommandRequest, plan_command
from allranks.launcher.scripts.run import run_command
from allranks.launcher.scripts.topology import Host
from conftest import Train

CANARY = "s3cr3tc4n4ry"
NAMES = (
    *("DB_PASS", "MYSQL_PWD", "JWT", "GITHUB_PAT", "SESSION_COOKIE", "SSHPASS", "PGPASSWORD"),
    *("API_KEY", "HF_TOKEN", "HFTOKEN", "CLIENT_SECRETS", "DBSECRET", "VAULT_AUTH", "authToken"),
    *("SIGNING_PASSPHRASE", "MY_CREDENTIALS", "PROXY_AUTHORIZATION", "STORAGE_ACCOUNTKEY"),
)
VALUES = (
    *(f"postgres://app:{CANARY}@db.example/models", f"redis://:{CANARY}@cache.example"),
    *(f"sk-{CANARY}", f"sk_live_{CANARY}", f"ghp_{CANARY}", f"github_pat_{CANARY}", f"hf_{CANARY}"),
    *(f"glpat-{CANARY}", f"xoxb-{CANARY}", f"nvapi-{CANARY}0123", f"npm_{CANARY}0123"),
    *(f"AKIA{CANARY.upper()}", f"ASIA{CANARY.upper()}", f"AIza{CANARY}0123", f"eyJ{CANARY}.eyJ"),
    *(f"Authorization: Bearer {CANARY}", f"Server=db;Password={CANARY};Port=1"),
    *(f"https://store.example/a?token={CANARY}", f"cd /x && DB_PASS={CANARY} python train.py"),
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{CANARY}",
)
HARMLESS = {
    **{"tokenizer": "bert", "path": "/usr/bin", "pattern": "*.tar", "compass": 3},
    **{
        "setting": "lr=0.1,key_size=8",
        "note": "a basic test of tokens",
        "url": "http://host:80/a@b",
    },
    **{"checkpoint": "step-00000012", "task": "hf_small", "name": "sk-learn", "author": "me"},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_says_so(name: str) -> None:
    assert redacted({name: CANARY, f"SLURM_{name}": CANARY}) == {
        name: HIDDEN,
        f"SLURM_{name}": HIDDEN,
    }


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_looks_like_one(value: str) -> None:
    assert redacted({"setting": value}) == {"setting": HIDDEN}


def test_what_is_none_is_kept() -> None:
    assert redacted(HARMLESS) == HARMLESS


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Secrets in variables whose names begin with what is recorded of the environment."""
    given = {f"SLURM_{name}": CANARY for name in NAMES}
    given |= {f"CONDA_{number}": value for number, value in enumerate(VALUES)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return list(given)


def assert_hidden(run: Path, variables: list[str]) -> None:
    (events,) = run.glob("events.jsonl")
    started = json.loads(events.read_text().splitlines()[0])
    assert {started["environment"][name] for name in variables} == {HIDDEN}
    for path in run.rglob("*"):
        assert path.is_dir() or CANARY.encode() not in path.read_bytes().lower(), path


def test_train_records_none(train: Train, variables: list[str]) -> None:
    assert_hidden(train("resume_tasks:Plain", steps=1).run_dir, variables)


def test_train_records_only_what_tells_how_it_was_run(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else stands in the environment may be anything."""
    monkeypatch.setenv("MY_OWN_BUSINESS", CANARY)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    events = train("resume_tasks:Plain", steps=1).run_dir / "events.jsonl"
    recorded = json.loads(events.read_text().splitlines()[0])["environment"]
    assert recorded["NCCL_DEBUG"] == "INFO" and "MY_OWN_BUSINESS" not in recorded


def test_run_records_none(tmp_path: Path, server: ForkServer, variables: list[str]) -> None:
    words = ("true", f"--db-pass={CANARY}", "--pat", CANARY, *VALUES)
    request = CommandRequest(command=words, run_dir=str(tmp_path / "run"))
    assert_hidden(run_command(request, server).run_dir, variables)


def test_a_dry_run_of_a_command_shows_none() -> None:
    """Neither for people nor as an object; the processes themselves get all of it."""
    flags = [word for name in NAMES for word in (f"--{name}", CANARY, f"{name}={CANARY}")]
    request = CommandRequest(command=("train.py", *flags, *VALUES))
    host = Host("here", "127.0.0.1", "lo", 1, (40000, 40001))
    plan = plan_command(request, (host,), {}, f"ghp_{CANARY}")
    told = json.dumps(plan.to_data()) + str(plan)
    assert CANARY not in told.lower()
    assert told.count(HIDDEN) >= 2 * (2 * len(NAMES) + len(VALUES))
    assert plan.ranks[0].command == request.command
    assert plan.ranks[0].environment["TORCHELASTIC_RUN_ID"] == f"ghp_{CANARY}"

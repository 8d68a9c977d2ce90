"""What looks like a secret, by its name or by itself;
and the three places where all of it passes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from allranks import launch
from allranks.job.job import HIDDEN, redacted
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.processes.ports import Reservation
from allranks.launcher.scripts import topology
from allranks.launcher.scripts.plan import CommandRequest, plan_command
from allranks.launcher.scripts.run import run_command
from conftest import Train
from launch_host import Host

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
IN_SETTINGS = {f"NCCL_{name}": CANARY for name in NAMES}
IN_SETTINGS |= {f"TORCH_{number}": value for number, value in enumerate(VALUES)}
PREFIXES = ("ALLRANKS", "SLURM", "CONDA", "PYTHON", "NVIDIA", "PATH", "HOSTNAME", "VIRTUAL_ENV")
ELSEWHERE = dict.fromkeys(("ALLRANKS_ID", "ALLRANKS_SECRET", *(f"{p}_X" for p in PREFIXES)), CANARY)
"""No name and no value of these looks like a secret: only a list of what is recorded keeps them."""
KEY = ("secret_tasks:WithKey", "--set", f"api_key={CANARY}")
TRAIN = ("train", *KEY, "--steps", "2", "--ranks", "2")
RUN = ("run", "--ranks", "2", "--rdzv-id", CANARY)
COMMAND = ("--", sys.executable, "-c", "import torch", f"--api-key={CANARY}")
BY_HAND = ("--rendezvous", "127.0.0.1:0", "--node-rank", "0", "--id", CANARY)
SIMULATED = ("--nodes", "2", "--place", "simulated")
SUBMIT = ("submit", "--cluster", "puhti", "--partition", "test", "--account", "p")
FP64 = ("--precision", "fp64")
BENCH = ("bench", KEY[0], "--ranks", "1", "--repeats", "1", "--steps", "2")
JOBS = {
    "train": (*TRAIN, "--id", CANARY),
    "train-json": (*TRAIN, "--log", "csv,phases", "--profile", "--json"),
    "train-failed": (*TRAIN, "--inject", "fail@rank=1,step=1"),
    "train-by-hand": (*TRAIN, *BY_HAND),
    "train-simulated": (*TRAIN, *SIMULATED),
    "train-dry": (*TRAIN, "--dry-run", "--id", CANARY),
    "train-dry-json": (*TRAIN, *SIMULATED, "--dry-run", "--json", "--id", CANARY),
    "ps": (*TRAIN, "--strategy", "ps"),
    "decoupled": (*TRAIN, "--strategy", "decoupled"),
    "sweep": ("sweep", *KEY, "--steps", "2", "--set", "seed=1,2"),
    "bench": (*BENCH, "--peers", "hand", "--page", "proposal", "--", *FP64, *KEY[1:]),
    "bench-dry": (*BENCH, "--dry-run", "--", *KEY[1:]),
    "check": ("check", *KEY, "--ranks", "2", "--steps", "2", "--json"),
    "check-script": ("check", "--ranks", "2", *COMMAND),
    "run": (*RUN, *COMMAND),
    "run-json": (*RUN, *SIMULATED, "--json", *COMMAND),
    "run-dry": (*RUN, "--dry-run", *COMMAND),
    "run-dry-json": (*RUN, "--dry-run", "--json", *COMMAND),
    "doctor": ("doctor", "--ranks", "2", "--id", CANARY),
    "submit": (*SUBMIT, "--dry-run", "--", "train", "digits"),
}
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
    for name, value in {**IN_SETTINGS, **ELSEWHERE}.items():
        monkeypatch.setenv(name, value)
    return list(IN_SETTINGS)


def assert_hidden(run: Path, variables: list[str]) -> None:
    (events,) = run.glob("events.jsonl")
    recorded = json.loads(events.read_text().splitlines()[0])["environment"]
    assert {recorded[name] for name in variables} == {HIDDEN}
    assert not recorded.keys() & ELSEWHERE.keys()
    assert_nowhere(run)


def assert_nowhere(folder: Path) -> None:
    for path in folder.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes().lower(), path


@pytest.mark.slow(most=8)
@pytest.mark.parametrize("job", JOBS)
def test_no_kind_of_job_leaves_one(host: Host, tmp_path: Path, job: str) -> None:
    """Neither in its folder nor on the terminal."""
    given = {**IN_SETTINGS, **ELSEWHERE}
    with Reservation(1) as reserved:  # whoever listens there next lets a port be used again
        words = [word.replace(":0", f":{reserved.ports[0]}") for word in JOBS[job]]
    running = host.launch(tmp_path, *words, environment=given)
    assert running.wait() == (1 if job == "train-failed" else 0), running.err
    assert_nowhere(tmp_path)
    if job == "train-json":  # nor do the verbs that look at it afterwards
        (run,) = tmp_path.glob("runs/*")
        for verb in (("show",), ("show", "--job"), ("report", "--out", "page.html")):
            assert host.launch(tmp_path, *verb, str(run), environment=given).wait() == 0
        assert_nowhere(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("variables")
def test_a_notebook_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launch(KEY[0], settings={"api_key": CANARY}, steps=2, ranks=2)
    assert_nowhere(tmp_path)


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
    request = CommandRequest(command=words, run_dir=str(tmp_path / "run"), run_id=CANARY)
    assert_hidden(run_command(request, server).run_dir, variables)


def test_a_dry_run_of_a_command_shows_none() -> None:
    """Neither for people nor as an object; the processes themselves get all of it."""
    flags = [word for name in NAMES for word in (f"--{name}", CANARY, f"{name}={CANARY}")]
    request = CommandRequest(
        command=("train.py", *flags, *VALUES), run_id=CANARY, environment=(("API_KEY", CANARY),)
    )
    host = topology.Host("here", "127.0.0.1", "lo", 1, (40000, 40001))
    plan = plan_command(request, (host,), {})
    told = json.dumps(plan.to_data()) + str(plan)
    assert CANARY not in told.lower()
    assert told.count(HIDDEN) >= 2 * (2 * len(NAMES) + len(VALUES))
    assert plan.ranks[0].command == request.command
    assert plan.ranks[0].environment["TORCHELASTIC_RUN_ID"] == CANARY

"""Nothing is reachable, nothing is unpickled, nothing that a name or a value says is ever run.

The network, pickles, secrets, terminals, hostile names, and the modes of files: each with a test
that would see it if it were otherwise.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import ipaddress
import os
import pty
import re
import select
import socket
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allranks.checkpoint import folder as checkpoint_folder
from allranks.cli.main import main
from allranks.errors import AllranksError, RequestError, printable
from allranks.job import faults
from allranks.job.config import resolve
from allranks.job.job import Job, read_job_file, redacted, write_toml
from allranks.job.program import find_program
from allranks.job.run_folder import RunFolder, read_events
from allranks.job.units import parse_duration
from allranks.launcher.plan import LocalMachine
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.start import JobWatcher, new_run_dir, plan_job, run_job
from allranks.strategies.choice import parse_choice
from conftest import Train, _descendants
from flipping import flip_bit
from launch_host import Host
from resume_tasks import HOSTILE

SOURCE = Path(__file__).parent.parent / "src" / "allranks"
MODULES = sorted(SOURCE.rglob("*.py"))

# --- the network ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Socket:
    """A socket of the internet, held by a process."""

    protocol: str
    local: str
    remote: str

    @property
    def stays_here(self) -> bool:
        ends = [ipaddress.ip_address(end) for end in (self.local, self.remote)]
        local, remote = (getattr(end, "ipv4_mapped", None) or end for end in ends)
        return local.is_loopback and (remote.is_loopback or remote.is_unspecified)


def _address(text: str) -> str:
    """`0100007F:1F90` -> `127.0.0.1`: words of 32 bits in the order of this machine."""
    words = bytes.fromhex(text.partition(":")[0])
    data = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return str(ipaddress.ip_address(data))


def sockets_of(pids: set[int]) -> set[Socket]:
    """The internet sockets that these processes hold, of any kind."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    found = set()
    for protocol in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        path = Path("/proc/net", protocol)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split()
            if words[9] in inodes:
                found.add(Socket(protocol, _address(words[1]), _address(words[2])))
    return found


@pytest.mark.parametrize(
    ("family", "kind", "address", "stays_here"),
    [
        (socket.AF_INET, socket.SOCK_STREAM, "0.0.0.0", False),
        (socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1", True),
        (socket.AF_INET, socket.SOCK_DGRAM, "0.0.0.0", False),
        (socket.AF_INET6, socket.SOCK_STREAM, "::", False),
        (socket.AF_INET6, socket.SOCK_STREAM, "::1", True),
    ],
)
def test_an_open_door_would_be_seen(
    family: socket.AddressFamily, kind: socket.SocketKind, address: str, stays_here: bool
) -> None:
    with socket.socket(family, kind) as opened:
        try:
            opened.bind((address, 0))
        except OSError:
            pytest.skip(f"no {address} on this machine")
        if kind == socket.SOCK_STREAM:
            opened.listen()
        assert [s.stays_here for s in sockets_of({os.getpid()})] == [stays_here]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
def test_a_local_job_can_not_be_reached_and_reaches_nobody(
    server: ForkServer, tmp_path: Path, backend: str
) -> None:
    """Looked at all the while that four ranks with loader workers train and save.

    In shared memory they have no socket at all.
    """
    seen: set[Socket] = set()
    most = 0

    def look() -> None:
        nonlocal seen, most
        pids = _descendants(os.getpid())
        most = max(most, len(pids))
        seen |= sockets_of(pids)

    flags: dict[str, Any] = {"ranks": 4, "steps": 15, "loader_workers": 1, "checkpoint_every": 5}
    flags["backend"] = backend
    slow = "slow@rank=1,seconds=0.1"
    resolved = resolve(
        "resume_tasks:Counted", {**flags, "inject": slow, "run_dir": str(tmp_path / "run")}
    )
    run_job(resolved, server, JobWatcher(tick=look))
    assert most >= 9, "the fork server, four ranks, four loader workers"
    assert bool(seen) == (backend == "gloo"), "the ranks do talk to each other"
    assert [s for s in seen if not s.stays_here] == []


# --- pickles, and text that is run ----------------------------------------------------------------

FORBIDDEN_MODULES = {
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("yaml", "ruamel"),
}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "os.system", "os.popen", "torch.load", "torch.save"),
    *("np.load", "numpy.load", "np.save", "torch.jit.load", "torch.package"),
}
FORBIDDEN_ENDS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "_object_to_tensor", "_tensor_to_object"),
}


OF_THE_USER = {  # the script that was to be run, the class of a notebook, the body of a test
    "launcher/scripts/exec_command.py": ["exec", "compile"],
    "cli/by_value.py": ["pickle", "cloudpickle"],
    "testing/on_rank.py": ["pickle"],
    "testing/worlds.py": ["marshal", "pickle", "cloudpickle"],
}


def what_is_open_in(source: str) -> list[str]:
    """What in a module could run text, or read a pickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.partition(".")[0] for name in names}
            found += sorted(roots & (FORBIDDEN_MODULES | FORBIDDEN_ENDS))
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            name = ast.unparse(node)
            if name in FORBIDDEN_CALLS or name.rpartition(".")[2] in FORBIDDEN_ENDS:
                found.append(name)
        if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle", "weights_only"):
            off = isinstance(node.value, ast.Constant) and node.value.value is False
            found += [] if off else [f"{node.arg}="]
    return found


@pytest.mark.slow
def test_no_module_reads_pickles_or_runs_text() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): what_is_open_in(path.read_text()) for path in MODULES
    }
    assert {module: names for module, names in found.items() if names} == OF_THE_USER


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml.loader",
        "from torch.distributed import all_gather_object",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "dist.all_gather_object(a, b)",
        "eval(text)",
        "run = exec",
        "subprocess.run(words, shell=True)",
        "subprocess.run(words, shell=flag)",
        "os.system(words)",
        "np.load(path)",
    ],
)
def test_such_a_module_would_be_seen(source: str) -> None:
    assert what_is_open_in(source)


def test_what_it_is_free_to_do() -> None:
    assert what_is_open_in("model.eval(); re.compile(x); subprocess.run(w, shell=False)") == []


@pytest.mark.slow
def test_going_on_unpickles_nothing(train: Train, tmp_path: Path) -> None:
    """In every rank: loading, a fallback, three steps, a save, an evaluation."""
    first, second = tmp_path / "first", tmp_path / "second"
    half = train("resume_tasks:Hooked", f"seen={first}", ranks=2, steps=3, checkpoint_every=1)
    newest = half.run_dir / "checkpoints" / "step-00000003"
    flip_bit(next(newest.glob("rank-000-*")), -1)
    found = train("", f"seen={second}", run_dir=str(half.run_dir), ranks=2, steps=6)
    assert found.summary["resumed_from_step"] == 2
    for path in (first, second):
        assert path.read_text().splitlines() == ["fractions.Fraction"] * 2, "one in each rank"


# --- secrets --------------------------------------------------------------------------------------

CANARY = "s3cr3t-c4n4ry"
SECRET_VARIABLES = (
    *("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "OPENAI_APIKEY"),
    *("PGPASSWORD", "MYSQL_PWD", "GITHUB_PAT", "SSHPASS", "DB_PASS", "MY_CREDENTIALS"),
    *("VAULT_AUTH", "authToken", "accessToken", "CLIENT_SECRETS", "SESSION_COOKIE", "JWT"),
    *("NPM_CONFIG__AUTH", "RSA_PRIVATEKEY", "SIGNING_PASSPHRASE"),
)
SECRET_VALUES = {
    "http_proxy": f"http://somebody:{CANARY}@proxy.example:3128",
    "DATABASE_URL": f"postgres://app:{CANARY}@db.example/models",
    "REDIS": f"redis://:{CANARY}@cache.example",
    "SETTING_A": f"sk-{CANARY}0123456789",
    "SETTING_B": f"ghp_{CANARY.replace('-', '')}0123456789",
    "SETTING_C": f"see -----BEGIN OPENSSH PRIVATE KEY-----\n{CANARY}",
}
FIELDS = {
    "api_key": CANARY,
    "hfToken": CANARY,
    "db_password": CANARY,
    "source": f"s3://user:{CANARY}@store/data",
    "aws": f"hf_{CANARY}0123",
}


def files_with(text: str, folder: Path) -> list[str]:
    """The files below whose bytes hold the text, or whose names do."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if text in path.name or (path.is_file() and text.encode() in path.read_bytes())
    ]


@pytest.mark.slow
def test_no_secret_is_written_or_shown(
    train: Train,
    server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of the environment and of the task: in no file, no plan, no summary;
    at start and going on."""
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, CANARY)
    for name, value in SECRET_VALUES.items():
        monkeypatch.setenv(name, value)
    words = [f"{name}={value}" for name, value in FIELDS.items()]
    run = tmp_path / "run"
    flags: dict[str, Any] = {"ranks": 2, "run_dir": str(run), "checkpoint_every": 1}
    result = train("resume_tasks:Secretive", *words, steps=2, **flags)
    assert files_with(CANARY, tmp_path) == []
    assert (run / "job.toml").read_text().count("[redacted]") == len(FIELDS)
    assert 'tokenizer = "words"' in (run / "job.toml").read_text()
    assert CANARY not in str(result.summary)
    resolved = resolve("resume_tasks:Secretive", {"ranks": 2}, tuple(words))
    plan = plan_job(resolved, LocalMachine(server))
    assert CANARY not in str(plan) + str(plan.to_data())
    assert plan.job.task["api_key"] == CANARY, "the ranks get it"
    for verb in (["show", str(run)], ["show", str(run), "--json"], ["runs", str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["allranks", *verb])
        with contextlib.suppress(SystemExit):
            main()
        out, err = capfd.readouterr()
        assert out and CANARY not in out + err
    with pytest.raises(RequestError) as refused:
        train("", run_dir=str(run), steps=3)
    assert "[redacted]" in refused.value.found and refused.value.do.startswith("give it again")
    again = [word.replace(CANARY, f"{CANARY}-2") for word in words]
    train("", *again, run_dir=str(run), steps=3)
    assert files_with(CANARY, tmp_path) == []


def test_what_is_no_secret_is_kept() -> None:
    harmless = {
        **{"tokenizer": "bert", "monkey": "x", "keyboard": "us", "sort_by": "size"},
        **{"compass": 3, "tokens": 5, "key_size": 8, "passes": "2", "url": "http://host:80/a@b"},
        **{"author": "me", "authority": "x", "password": "", "api_key": None},
    }
    assert redacted(harmless) == harmless


def test_a_refused_value_of_a_job_names_no_secret(train: Train, tmp_path: Path) -> None:
    """A fault of the program leaves its run folder: nothing of the fields is in it either."""
    with pytest.raises(AllranksError):
        train(
            "resume_tasks:Secretive",
            f"api_key={CANARY}",
            ranks=2,
            steps=3,
            inject="fail@rank=1,step=1",
            run_dir=str(tmp_path / "run"),
        )
    assert (tmp_path / "run").is_dir()
    assert files_with(CANARY, tmp_path) == []


# --- terminals ------------------------------------------------------------------------------------


def on_a_terminal(host: Host, folder: Path, *words: str, kind: str = "dumb") -> tuple[int, bytes]:
    """The exit code of `allranks WORDS`, and every byte that a terminal is sent by it.

    On one that is `dumb` the display does not move about, so no control character is its own.
    """
    ours, theirs = pty.openpty()
    name = os.ttyname(theirs)
    shown = bytearray()
    try:
        environment = {"TERM": kind}
        launch = host.launch(folder, *words, err=name, out=name, environment=environment)
        while launch.code is None or select.select([ours], [], [], 0)[0]:
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 1 << 16)
        return launch.wait(), bytes(shown)
    finally:
        os.close(ours)
        os.close(theirs)


def assert_harmless(shown: bytes) -> None:
    text = shown.decode()
    steering = {c for c in text if c != "\t" and c not in "\r\n" and not c.isprintable()}
    assert steering == set(), [line for line in text.splitlines() if steering & set(line)][:5]
    assert max(map(len, text.splitlines()), default=0) <= 20_000, "a line without an end"


@pytest.fixture
def hostile_run(host: Host, tmp_path: Path) -> tuple[Path, bytes]:
    """A run in a folder of a hostile name, whose output and metrics are hostile too."""
    run = tmp_path / "runs" / HOSTILE
    words = ["--ranks", "2", "--steps", "3", "--checkpoint-every", "2", "--best", f"max:{HOSTILE}"]
    code, shown = on_a_terminal(
        host, tmp_path, "train", "resume_tasks:Speaks", *words, "--run-dir", str(run)
    )
    assert code == 0, shown[-3000:]
    return run, shown


@pytest.mark.slow
def test_nothing_of_a_run_steers_the_terminal(host: Host, hostile_run: tuple[Path, bytes]) -> None:
    run, shown = hostile_run
    assert_harmless(shown)
    assert rb"\x1b]0;owned" in shown, "what was printed is shown, not sent"
    log = (run / "logs" / "rank-000.log").read_bytes()
    assert HOSTILE.encode() + b"\xff\xfe\n" in log, "in the file it is as it was"
    assert b"x" * 1_000_000 in log
    for words in (
        ["show", str(run)],
        ["show", str(run), "--json"],
        ["runs", str(run.parent)],
        ["runs", str(run.parent), "--json"],
        ["checkpoints", "list", str(run)],
        ["checkpoints", "verify", str(run)],
        ["train", "--run-dir", str(run), "--dry-run"],
        ["train", "--run-dir", str(run), "--seed", "5"],
        ["train", "digits", "--resume", str(run / "logs"), "--run-dir", "new"],
    ):
        _, shown = on_a_terminal(host, run.parent, *words)
        assert shown
        assert_harmless(shown)


@pytest.mark.slow
def test_the_live_display_steers_the_terminal_by_itself_alone(host: Host, tmp_path: Path) -> None:
    """It moves about and colours; titles, bells and what else a run would send are not sent."""
    words = ["train", "resume_tasks:Speaks", "--ranks", "2", "--steps", "3", "--run-dir", HOSTILE]
    code, shown = on_a_terminal(
        host, tmp_path, *words, "--checkpoint-every", "2", kind="xterm-256color"
    )
    assert code == 0 and b"\x1b[" in shown, shown[-3000:]
    own = re.sub(rb"\x1b\[[0-9;?]*[A-HJKSThlmr]", b"", shown)
    assert_harmless(own)
    assert rb"\x1b]0;owned" in shown


@pytest.mark.slow
def test_no_exception_steers_the_terminal(host: Host, tmp_path: Path) -> None:
    words = ("train", "resume_tasks:Fails", "--ranks", "2", "--run-dir", HOSTILE)
    code, shown = on_a_terminal(host, tmp_path, *words)
    assert code == 1 and b"evil" in shown
    assert_harmless(shown)
    _, shown = on_a_terminal(host, tmp_path, "show", HOSTILE)
    assert b"evil" in shown
    assert_harmless(shown)


@pytest.mark.parametrize(
    "words",
    [
        [HOSTILE],
        ["train", HOSTILE],
        ["train", "digits", f"--{HOSTILE}"],
        ["train", "digits", "--ranks", HOSTILE],
        ["train", "digits", "--strategy", HOSTILE],
        ["train", "digits", "--set", HOSTILE],
        ["train", "digits", "--set", f"{HOSTILE}=1"],
        ["train", "digits", "--set", f"lr={HOSTILE}"],
        ["train", "digits", "--inject", HOSTILE],
        ["train", "digits", "--best", HOSTILE],
        ["train", "digits", "--time-limit", HOSTILE],
        ["train", "digits", "--resume", HOSTILE],
        ["train", "digits", "--job", HOSTILE],
        ["train", "digits\n\n\nfound: nothing\n", "--seed", "-1"],
        ["train", "digits", "--set", f"{'x' * 100_000}=1"],
        ["show", HOSTILE],
        ["runs", HOSTILE],
        ["checkpoints", "list", HOSTILE],
        ["strategies", HOSTILE],
    ],
    ids=lambda words: " ".join(map(ascii, words))[:60],
)
def test_no_word_of_a_command_steers_the_terminal(
    words: list[str],
    server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Words come from scripts and from the names of files, not only from who sits there."""
    name = "allranks.launcher.start.ForkServer"
    monkeypatch.setattr(name, lambda modules: contextlib.nullcontext(server))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["allranks", *words])
    with contextlib.suppress(SystemExit):
        main()
    out, err = capfd.readouterr()
    assert out + err
    assert_harmless((out + err).encode())


# --- hostile names and values ---------------------------------------------------------------------

CANARY_FILE = "canary"
FRAGMENTS = st.sampled_from(
    [
        *(
            "\n",
            "\r\n",
            "\t",
            "\0",
            "'",
            '"',
            '"""',
            "'''",
            "`",
            "\\",
            "$",
            ";",
            "|",
            "&",
            "&&",
            "#",
        ),
        *(
            "$(touch canary)",
            "`touch canary`",
            "; touch canary;",
            "| touch canary",
            "\ntouch canary\n",
        ),
        *(
            "__import__('os').system('touch canary')",
            "{open('canary','w')}",
            "%s%n",
            "{0}",
            "${IFS}",
        ),
        *(
            "..",
            "../",
            "../../",
            "/",
            "//",
            ".",
            "~",
            "~root",
            "-",
            "--",
            "-rf",
            "*",
            "?",
            "[",
            "]",
        ),
        *(
            "@",
            "=",
            ",",
            ":",
            "(",
            ")",
            "a",
            "kill",
            "rank",
            "step",
            "1",
            "-1",
            "nan",
            "inf",
            "1e999",
        ),
        *(
            "\ud800",
            "\udcff",
            "\udfff\ud800",
            "\x1b]0;x\x07",
            "\u202e",
            "\u2028",
            "\x85",
            "é",
            "日本",
        ),
        *(
            "none",
            "true",
            "[task]",
            "ranks = 9",
            "schema = 2",
            "digits",
            "ddp",
            "single",
            ".py",
            "²",
        ),
        *(
            "max:",
            "min:",
            "job.toml",
            "checkpoints",
            "step-00000001",
            "manifest.json",
            "CON",
            "\x7f",
        ),
    ]
)
HUGE = st.sampled_from(
    ["9" * 5000, "a" * 10_000, "[" * 3000, "../" * 2000, "\0" * 50, "ab@=" * 2500]
)
SHORT = st.lists(FRAGMENTS, max_size=6).map("".join) | st.text(max_size=40)
HOSTILE_TEXT = SHORT | st.tuples(FRAGMENTS, st.integers(0, 9), HUGE).map(
    lambda t: t[0] + t[2] * (t[1] == 9)
)


def calmly(act: Callable[[], Any]) -> Any:
    """What `act` returns; `None` if it refuses. Any other error is a fault of ours."""
    refusal = ""
    try:
        return act()
    except AllranksError as error:
        refusal = str(error)
    lines = refusal.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["asked", "found", "why", "do"]
    assert all(printable(line) == line and len(line) < 3000 for line in lines)
    return None


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Deep enough that `../..` is still inside; nothing in it has to last."""
    here = tmp_path / "a" / "b" / "c"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    return tmp_path


def left_in(sandbox: Path) -> list[Path]:
    """What was made in it, a canary too."""
    return [path for path in sandbox.rglob("*") if path.name not in "abc"]


EXAMPLES = settings.default.max_examples  # 100, and 400 under --exhaustive
UNHURRIED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.slow
@settings(max_examples=5 * EXAMPLES, derandomize=True, suppress_health_check=UNHURRIED)
@given(text=HOSTILE_TEXT, other=HOSTILE_TEXT)
def test_hostile_words(text: str, other: str, sandbox: Path) -> None:
    """Every word of a command, every name: read or refused, never run, nothing written."""
    _commands(text, other)
    _names(text)
    assert left_in(sandbox) == []


@pytest.mark.slow
@settings(max_examples=2 * EXAMPLES, derandomize=True, suppress_health_check=UNHURRIED)
@given(text=HOSTILE_TEXT, other=HOSTILE_TEXT)
def test_hostile_run_folders(text: str, other: str, sandbox: Path) -> None:
    """To the files and back: what is written lies in the folder that was named,
    and says the same."""
    _files(text, other, sandbox)
    assert left_in(sandbox) == []


def _commands(text: str, other: str) -> None:
    """Every word of a job."""
    for name in ("strategy", "place", "device", "precision", "best", "on_bad_step", "inject"):
        calmly(lambda name=name: resolve("digits", {name: text}))
    for name in ("resume", "run_dir"):
        calmly(lambda name=name: resolve("digits", {name: text}))
    calmly(lambda: resolve(text, {}, (other,), None))
    calmly(lambda: resolve("digits", {}, (f"{text}={other}",), None))
    calmly(lambda: resolve("", {}, (), text))
    calmly(lambda: parse_choice(text))
    for fault in calmly(lambda: faults.parse(text)) or ():
        assert fault.action in faults.ACTIONS and fault.at in faults.POINTS
    seconds = parse_duration(text)
    assert seconds is None or 0 <= seconds < float("inf")


def _files(text: str, other: str, sandbox: Path) -> None:
    """A run folder of that name and with those values, and its job again."""
    inside = os.path.abspath(text)
    if not inside.startswith(f"{sandbox}/"):
        return  # it was named: whoever asks for /etc gets it, if he may
    resolved = calmly(
        lambda: resolve("digits", {"run_dir": text, "inject": ""}, (f"{text}={other}",))
    )
    if resolved is None or not resolved.job.run_dir:
        return
    before = set(sandbox.rglob("*"))
    folder = calmly(lambda: RunFolder(Path(os.path.abspath(resolved.job.run_dir))))
    if folder is None:
        return
    try:
        folder.write_job(resolved)
        folder.events.event("started", words=[text, other])
        made = set(sandbox.rglob("*")) - before
        assert all(p.is_relative_to(inside) or Path(inside).is_relative_to(p) for p in made)
        values, task = read_job_file(str(folder.path / "job.toml"))
        again = Job(**values, task=task)
        wanted = redacted(resolved.job.task)
        assert again == dataclasses.replace(resolved.job, run_dir="", task=wanted)
        (event,) = read_events(folder.path)
        assert event["words"] == [text, other]
    finally:
        folder.remove()


def _names(text: str) -> None:
    """Programs, checkpoints, and names that are made of names."""
    calmly(lambda: find_program(text, Job))
    with contextlib.suppress(OSError, ValueError):
        assert checkpoint_folder.committed(Path(text)) == []
    checkpoint_folder.step_of(Path(text))
    made = new_run_dir(text)
    assert made.startswith("runs/") and "/" not in made[5:] and ".." not in made


@pytest.mark.slow
@settings(max_examples=2 * EXAMPLES, derandomize=True)
@given(st.dictionaries(SHORT, SHORT | st.integers() | st.floats() | st.booleans()))
def test_hostile_tables_are_toml(table: dict[str, Any]) -> None:
    """What cannot be written as text is refused before; all the rest is read as it was written."""
    if any("\ud800" <= c <= "\udfff" for text in map(str, [*table, *table.values()]) for c in text):
        return
    found = tomllib.loads(write_toml({"task": table}))["task"]
    assert found.keys() == table.keys()
    assert all(found[n] == v or (v != v and found[n] != found[n]) for n, v in table.items())


@pytest.mark.parametrize(
    "content",
    [
        b"a = " + b"[" * 100_000,
        b"a = " + b"{a=" * 10_000,
        b"a = " + b"9" * 5000,
        b"a.b.c = 1\n" * 2,
        b'program = "digits"\n[task]\nlr = [1, 2]\n',
        b'program = "digits"\n[task.lr]\na = 1\n',
        b'program = "digits"\nranks = 1979-05-27\n',
        b"\xff\xfe\x00",
        b"\x00",
        b"",
    ],
    ids=lambda content: ascii(content[:20]),
)
def test_hostile_job_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    calmly(lambda: resolve("", {}, (), str(path)))
    calmly(lambda: resolve("", {"run_dir": str(tmp_path)}))


# --- modes ----------------------------------------------------------------------------------------


def test_nobody_else_can_write_into_a_run_folder(train: Train) -> None:
    result = train("resume_tasks:Rates", ranks=2, steps=3, checkpoint_every=1)
    paths = [result.run_dir, *result.run_dir.rglob("*")]
    assert len(paths) > 10
    os.umask(umask := os.umask(0o022))
    assert umask & 0o022 == 0o022, "under a mask of your own files may be shared"
    open_ones = [str(path) for path in paths if path.lstat().st_mode & 0o022]
    assert open_ones == []
    assert not [str(p) for p in paths if p.is_file() and p.stat().st_mode & 0o111], "none is run"

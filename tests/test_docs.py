"""What the documents show is true: every command runs, every file shown is used, no link is dead.

A section of a document is one test. The files that the document shows are written to an empty
folder, and the commands of the section run there in order:

    a line "`name.py`:" before a block      the block is that file
    ```sh, or ```sh exit=2                  one command per line, with the exit code of the last
    ```sh same=weights                      ... and the lines that begin so are all the same
    allranks …  # kill -TERM while it trains    a signal, once the job has made some steps
    ```text after a sh block                lines of its output, in order, whatever the numbers are;
                                            … stands for anything
    allranks … in a sentence, or indented   is not run: its options are parsed

The file `mytask.py` of README.md is in every folder, and `examples/` in those of README.md. In
sections of other documents `mytask.py` trains for fewer epochs than the README says; and jobs are
not checked before they train, but in PROVE.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from allranks.catalog import ENGINES, TENSORFLOW, TORCH
from allranks.cli.main import cli, main
from allranks.job import faults, resume
from allranks.launcher.processes.fork_server_client import ForkServer
from allranks.launcher.supervisor import Signals
from allranks.strategies.cards import CARDS
from allranks.strategies.choice import parse_choice
from conftest import ROOT

DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")))
}
FENCE = re.compile(r"^```(\w+)(?: exit=(\d+)| same=(\w+))?\n(.*?)^```$", re.M | re.S)
RUN_FENCE = re.compile(r"^```(?!console).*?^```$", re.M | re.S)
FILE_NAME = re.compile(r"`([\w.-]+)`:\n\n$")
SECTION = re.compile(r"^## ", re.M)
SIGNAL = re.compile(r"  # (?:kill -(\w+)|Ctrl-C) while it trains$")
LINK = re.compile(r"\]\(([^)]+)\)")
TYPED = re.compile(r"^(?:    |\w+\$ +)(allranks .*)$|`(allranks \w+ [^`]*--\w[^`]*)`", re.M)
PRINTED = re.compile(r'<text class="[\w-]+-r\d+" x="[\d.]+" y="([\d.]+)".*?>(.*?)</text>')
ELSEWHERE = "github.com", "arxiv.org"
TERMINAL = ROOT / "docs" / "terminal.svg"
CONSTRAINTS = ROOT / "constraints.txt"
WITH_TENSORFLOW = "docs/tensorflow.md"
SHOWS_TENSORFLOW = r"\.\[tensorflow|--engine tensorflow"
LESS = "epochs: int = 20", "epochs: int = 4"  # of the task that most sections train
FIRST = "README.md"  # what a newcomer types is in the first tier of the tests
PLUGIN = "allranks.testing.plugin"  # pytest finds it by itself where allranks is installed
PROVE = FIRST, "docs/tour.md", "docs/correctness.md"
LONG = {
    *("docs/benchmarking.md: A script", "docs/report.md: A bench", "docs/tour.md: Stop and resume"),
    *("docs/huggingface.md: Packed texts", "docs/huggingface.md: Texts in an evaluation"),
    *("docs/testing.md: A layer", "docs/testing.md: A training step"),
}
"""Sections that take longest, and show what other tests hold: only --exhaustive runs them."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it is (or ""), the exit code, its text.

    `same` is how the lines begin that must be the same in the output of all its commands.
    """

    language: str
    file: str
    exit: int
    same: str
    text: str


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code and what it wrote."""

    line: str
    code: int
    out: str
    err: str


Run = Callable[[str], Done]


def blocks_of(text: str) -> list[Block]:
    """The blocks of a document or of a section, in order."""
    found = []
    for match in FENCE.finditer(text):
        name = FILE_NAME.search(text[: match.start()])
        file = name[1] if name else ""
        found.append(Block(match[1], file, int(match[2] or 0), match[3] or "", match[4]))
    return found


def sections(with_tensorflow: bool) -> Iterator[Any]:
    """(document, section) for every section that shows a command, with TensorFlow or without."""
    for document, text in DOCUMENTS.items():
        for section in SECTION.split(text):
            needs = document == WITH_TENSORFLOW or re.search(SHOWS_TENSORFLOW, section) is not None
            if needs == with_tensorflow and any(
                block.language == "sh" for block in blocks_of(section)
            ):
                title = section.partition("\n")[0].removeprefix("# ")
                marks = () if document == FIRST else (pytest.mark.slow,)
                yield pytest.param(document, section, id=f"{document}: {title}", marks=marks)


def output_pattern(block: str) -> re.Pattern[str]:
    """What output that looks like `block` matches: any numbers, and anything for …"""
    lines = []
    for line in block.splitlines():
        if line.strip() != "…":
            numbers = re.sub(r"[0-9a-f]{64}|\d[\d.,]*(e[+-]?\d+)?", "\0", line)
            escaped = re.escape(numbers).replace("…", r"[^\n]*")
            lines.append(escaped.replace(re.escape("\0"), r"[\w.,+-]+"))
    return re.compile("^" + r"$(?:.*?)^".join(lines) + "$", re.M | re.S)


@pytest.fixture
def servers(server: ForkServer) -> dict[str, ForkServer]:
    """The warm fork server of each engine; who uses TensorFlow puts `tf_server` in."""
    return {"torch": server}


@pytest.fixture
def document() -> str:
    """The document whose commands are run, where the parameters of a test name none."""
    return FIRST


@pytest.fixture
def run(
    document: str,
    servers: dict[str, ForkServer],
    on_ranks: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """`run(line)`: what a person would get who typed this line in an empty folder.

    To be quick, `allranks` runs in this process and `python` in a fork, both on the warm server;
    scripts of torch that `allranks` starts in README.md are forks of that server, too (`--warm`).
    """
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    environment = Path(sys.executable).parent  # it is active
    monkeypatch.setenv("PATH", f"{environment}{os.pathsep}{os.environ['PATH']}")
    if document == FIRST:
        shutil.copytree(ROOT / "examples", folder / "examples")

    def warm(modules: tuple[str, ...]) -> contextlib.AbstractContextManager[ForkServer]:
        wanted = "torch" if ENGINES[TORCH].preload in modules else "tensorflow"
        wanted = "keras" if ENGINES[TORCH].guests[TENSORFLOW].preload in modules else wanted
        return contextlib.nullcontext(servers.get(wanted, servers["torch"]))

    for module in ("launcher.start", "cli.checkpoints", "tools.check.check"):
        monkeypatch.setattr(f"allranks.{module}.ForkServer", warm)

    def allranks(words: list[str]) -> Done:
        unproved = (
            ["--first-check", "off"] if document not in PROVE and "train" in words[1:2] else []
        )
        if document == FIRST and words[1] in ("check", "run") and "python" in words:
            words = [*words[:2], "--warm", *words[2:]]
        monkeypatch.setattr(sys, "argv", [*words, *unproved])
        code: Any = 0
        try:
            main()
        except SystemExit as left:
            code = left.code
        return Done(shlex.join(words), int(code or 0), *capsys.readouterr())

    def make(words: list[str]) -> Done:
        """What make would do is looked at; of that, only our own command is run."""
        done = process(["make", "-C", str(ROOT), "-n", "PYTHON=python3", *words[1:]])
        assert done.code == 0, done.err
        (ours,) = re.findall(r"^\S*bin/(allranks .*)$", done.out, re.M) or [""]
        if ours:
            return allranks(shlex.split(ours))
        tools = {
            "check": ["ruff check .", "mypy"],
            "test": ["pytest .*--tier quick"],
        }
        assert all(re.search(f"bin/{tool}$", done.out, re.M) for tool in tools[words[1]]), done.out
        return done

    def process(words: list[str]) -> Done:
        done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
        return Done(shlex.join(words), done.returncode, done.stdout, done.stderr)

    def python(words: list[str]) -> Done:
        script = (folder / words[1]).read_text()
        if "allranks.launch(" in script or "import keras" in script:  # the fork would be a rank
            return process([sys.executable, *words[1:]])
        on_ranks(1, "docs_workers:run_script", str(folder / words[1]))
        return Done(shlex.join(words), 0, (tmp_path / "worker-0.log").read_text(), "")

    ways: dict[str, Callable[[list[str]], Done]] = {
        "allranks": allranks,
        "make": make,
        "python": python,
        "torchrun": lambda words: process(
            [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        ),
        "pip": lambda words: Done(shlex.join(words), 0, "", ""),
        "pytest": lambda words: process([sys.executable, "-m", *words, "-p", PLUGIN]),
    }

    def type_line(line: str) -> Done:
        words = shlex.split(line, comments=True)
        found = SIGNAL.search(line)
        with signal_meanwhile(words, found[1] or "INT") if found else contextlib.nullcontext():
            return ways.get(words[0], process)(words)

    return type_line


@contextlib.contextmanager
def signal_meanwhile(words: list[str], name: str) -> Iterator[None]:
    """Send this process a signal as soon as the job of a command line has made some steps."""
    metrics = Path(words[words.index("--run-dir") + 1]) / "metrics.jsonl"
    over = threading.Event()

    def send() -> None:
        while not over.wait(0.02):
            if metrics.is_file() and metrics.stat().st_size:
                os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
                return

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def write_files(document: str) -> None:
    for name in ("README.md", document):
        for block in blocks_of(DOCUMENTS[name]):
            if block.file and (name == document or block.file == "mytask.py"):
                text = block.text if document == FIRST else block.text.replace(*LESS)
                Path(block.file).write_text(text)


def run_blocks(section: str, run: Run) -> list[Done]:
    """Run the commands of a section, and compare what they print with what the section shows."""
    done: list[Done] = []
    printed = ""
    for block in blocks_of(section):
        if block.language == "sh":
            lines = block.text.splitlines()
            results = [run_a_command(run, line) for line in lines]
            printed = "\n".join(result.out + result.err for result in results)
            codes = [result.code for result in results]
            assert codes == [0] * (len(lines) - 1) + [block.exit], f"{lines}\n{codes}\n{printed}"
            assert_same(block.same, results)
            done += results
        elif block.language == "text" and printed:
            assert output_pattern(block.text).search(printed), f"{block.text}\nis not in\n{printed}"
            printed = ""
    return done


def run_a_command(run: Run, line: str) -> Done:
    """Run it; a script whose work is done may die of a thread of torch's: it is run once more."""
    done = run(line)
    died = " -- " in line and "killed by SIGABRT" in done.err and "<no Python frame>" in done.err
    return run(line) if died else done


def assert_same(begin: str, results: list[Done]) -> None:
    """Every command printed one line that begins so, and it is the same line."""
    if begin:
        printed = [re.findall(rf"^{begin} .*$", done.out, re.M) for done in results]
        assert all(len(lines) == 1 and lines == printed[0] for lines in printed), printed


@pytest.mark.slow
@pytest.mark.parametrize(("document", "section"), [*sections(with_tensorflow=True)])
def test_what_a_section_with_tensorflow_shows_is_true(
    document: str,
    section: str,
    run: Run,
    servers: dict[str, ForkServer],
    tf_server: ForkServer,
    keras_server: ForkServer,
) -> None:
    servers.update(tensorflow=tf_server, keras=keras_server)
    write_files(document)
    run_blocks(section, run)


def test_what_is_broken_upstream_was_seen_with_the_versions_that_are_pinned() -> None:
    """With others it has to be tried again."""
    pinned = dict(re.findall(r"^(tensorflow|keras)==(\S+)$", CONSTRAINTS.read_text(), re.M))
    seen = f"TensorFlow {pinned['tensorflow']}, Keras {pinned['keras']} and Python"
    assert seen in DOCUMENTS[WITH_TENSORFLOW]


@pytest.mark.slow(most=44)
@pytest.mark.cases(
    ("document", "section"),
    [one for one in sections(with_tensorflow=False) if one.id not in LONG],
    exhaustive=[one for one in sections(with_tensorflow=False) if one.id in LONG],
)
def test_what_a_section_shows_is_true(document: str, section: str, run: Run) -> None:
    write_files(document)
    done = run_blocks(section, run)
    digests: dict[str, set[str]] = {}
    for result in done:
        if re.search("train .*--bitwise", result.line) and "sha256 " in result.out:
            digest = re.findall("sha256 ([0-9a-f]{64})", result.out)
            digests.setdefault(re.sub(r"--ranks \d+", "", result.line), set()).update(digest)
    assert all(len(found) == 1 for found in digests.values()), "the bits follow the ranks"
    if "field | meaning" in section:
        named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.*?)\|", section, re.M)))
        assert sorted(named) == sorted(json.loads(done[-1].out.splitlines()[-1]))


def test_every_file_that_is_shown_is_used() -> None:
    for document, text in DOCUMENTS.items():
        shown = [block for block in blocks_of(text) if block.language in ("python", "toml")]
        commands = "".join(block.text for block in blocks_of(text) if block.language == "sh")
        for block in shown:
            assert block.file, f"{document} shows a block that is no file:\n{block.text}"
            assert block.file in commands, f"{document} shows {block.file} and never runs it"


def test_every_command_that_is_shown_and_not_run_is_understood() -> None:
    """Those within a sentence, or indented: verb, options, their values, and the strategy."""
    for document, text in DOCUMENTS.items():
        prose = re.sub(r" *\\\n *", " ", RUN_FENCE.sub("", text))
        for match in TYPED.finditer(prose):
            _, verb, *words = shlex.split(match[1] or match[2])
            if not {"…", "$S"} & {*words}:
                above = cli.make_context("allranks", [verb])
                command = cli.get_command(above, verb)
                assert command is not None, f"{document}: {match[0]}"
                with contextlib.suppress(click.exceptions.Exit):  # of --help
                    command.make_context(verb, words, parent=above)
                for flag, value in itertools.pairwise(words):
                    if flag == "--strategy":
                        parse_choice(value)


def test_a_task_of_your_own_is_short_and_the_same_everywhere() -> None:
    (readme,) = (b.text for b in blocks_of(DOCUMENTS["README.md"]) if b.file == "mytask.py")
    (tour,) = (b.text for b in blocks_of(DOCUMENTS["docs/tour.md"]) if b.file == "mytask.py")
    assert readme.count("\n") < 40
    assert readme == tour


def test_every_link_leads_somewhere() -> None:
    for document, text in DOCUMENTS.items():
        for link in LINK.findall(FENCE.sub("", text)):
            if link.startswith("https://"):
                assert link.split("/")[2] in ELSEWHERE, f"{document}: {link}"
            else:
                path, _, anchor = link.partition("#")
                assert not anchor, f"{document}: {link}: anchors are not checked, so not used"
                assert ((ROOT / document).parent / path).is_file(), f"{document}: {link}"


def test_the_pictures_load_nothing() -> None:
    for picture in ROOT.glob("docs/*.svg"):
        text = picture.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|@import|@font-face|href|<script", text), picture


@pytest.mark.slow
def test_the_terminal_shows_what_its_commands_print(run: Run) -> None:
    """But for its numbers, the folder it was made in, and lines that depend on the time.

    Which tensor rounds most depends on what else the machine does.
    """
    lines: dict[float, str] = {}
    for y, text in PRINTED.findall(TERMINAL.read_text()):
        lines[float(y)] = lines.get(float(y), "") + html.unescape(text).replace("\xa0", " ")
    _, *sessions = "\n".join(lines[y].rstrip() for y in sorted(lines)).split("$ ")
    assert len(sessions) == 2
    for session in sessions:
        command, _, shown = session.partition("\n")
        shown = re.sub("^epoch.*$", "…", shown.strip(), flags=re.M).replace("/demo", "…")
        shown = re.sub("; (largest|no) difference.*$", "; …", shown, flags=re.M)
        done = run(command)
        printed = done.err + done.out
        assert output_pattern(shown).search(printed), f"{shown}\nis not in\n{printed}"


@pytest.mark.parametrize("strategy", CARDS)
def test_every_strategy_is_named(strategy: str) -> None:
    assert f"| `{strategy}` |" in DOCUMENTS["docs/strategies.md"]


def test_every_fault_on_purpose_is_named() -> None:
    page = DOCUMENTS["docs/faults_on_purpose.md"]
    assert all(f"\n| `{action}` |" in page for action in faults.ACTIONS)
    assert all(f"\n| `{point}` | {when} |\n" in page for point, when in faults.POINTS.items())


def test_every_signal_is_named() -> None:
    page = DOCUMENTS["docs/when_it_fails.md"]
    assert all(number.name in page for number in (*Signals.STOP, signal.SIGUSR2))


def test_all_that_may_change_is_named() -> None:
    (section,) = (s for s in SECTION.split(DOCUMENTS["docs/checkpoints.md"]) if "on the way\n" in s)
    flags = ["--" + name.replace("_", "-") for name in resume.CHANGEABLE]
    only_one = {"--nodes", "--place"}  # value of them is there in this version
    ours = {"--run-dir", "--resume"}  # how to say from where
    ours |= {"--micro-batch-trial"}  # of --micro-batch auto
    assert not [f for f in flags if f"`{f}`" not in section and f not in only_one | ours]
    assert all(f"`{name}`" in section for name in resume.POSITION_FIELDS)


def test_a_block_of_output_is_compared_but_for_its_numbers() -> None:
    pattern = output_pattern("accuracy   0.9900\n…\nrank 1 on …, 3 steps\n")
    assert pattern.search("before\naccuracy   0.5\nx\nrank 12 on a host, 1,000 steps\nafter")
    assert not pattern.search("accuracy 0.5\nrank 1 on a host, 3 steps")
    assert not pattern.search("rank 1 on a host, 3 steps\naccuracy   0.9900")
    assert not pattern.search("accuracy   0.5\nrank 1 on a host, 3 steps and more")

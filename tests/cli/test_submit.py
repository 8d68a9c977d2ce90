"""`allranks submit`: what is sent, what is refused before anything is written, what is followed."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.main import main
from allranks.launcher.slurm.request import SlurmOptions, make_request
from allranks.launcher.slurm.site import load_site
from fake_sbatch import read_script
from slurm_answers import CONFIG, NODES, PARTITIONS, job_line

Door = Callable[..., tuple[int, str, str]]
FAKE = Path(__file__).parent.parent / "fake_sbatch.py"
ML = ("submit", "--cluster", "taurus-ml", "--venv", "none")
CUDA = ("--", "train", "digits", "--device", "cuda")


@pytest.fixture
def door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Door:
    """`door(*words)`: exit code, standard output and error,
    in a folder of its own without Slurm."""
    work, commands = tmp_path / "work", tmp_path / "bin"
    work.mkdir()
    commands.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", str(commands))
    for name in ("SBATCH_ACCOUNT", "SLURM_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["allranks", *words])
        code: Any = 0
        try:
            main()
        except SystemExit as left:
            code = left.code
        out, err = capsys.readouterr()
        return int(code or 0), out, err

    return call


@pytest.fixture
def cluster(door: Door, tmp_path: Path) -> Path:
    """A machine with Slurm, without accounts: what sbatch was given is in the file returned."""
    config = CONFIG.replace("associations,limits,qos,safe", "none")
    table = {"config": config, "partition": PARTITIONS, "node": NODES}
    ended = job_line(job=4711, state="COMPLETED", reason="None", restarts=0, code="0:0")
    record, commands = tmp_path / "record.jsonl", tmp_path / "bin"
    scripts = {
        "scontrol": f"import sys\nprint({table!r}.get(sys.argv[-1], {ended!r}))",
        "sbatch": "import os, sys\n"
        f"os.execv({sys.executable!r}, ['x', {str(FAKE)!r}, {str(record)!r}, *sys.argv[1:]])",
    }
    for name, body in scripts.items():
        (commands / name).write_text(f"#!{sys.executable} -I\n{body}\n")
        (commands / name).chmod(0o755)
    return record


def program_of(script: str) -> list[str]:
    """The words of the program in a script, whatever lines they take."""
    joined = script.replace(" \\\n", " ")
    line = next(line for line in joined.splitlines() if line.endswith("|| code=$?"))
    return shlex.split(line.removesuffix("|| code=$?"))


def nothing_is_written(folder: Path = Path()) -> bool:
    return not any(folder.iterdir())


# --- what is sent ---------------------------------------------------------------------------


def test_a_dry_run_prints_the_script_and_writes_nothing(door: Door) -> None:
    code, out, err = door(*ML, "--time", "2:00:00", "--requeue", "--dry-run", *CUDA)
    assert (code, err) == (0, "")
    options = read_script(out, old=False)
    assert {"--job-name=digits", "--partition=ml", "--mem=250000", "--gres=gpu:6"} <= set(options)
    assert {"--time=02:00:00", "--signal=USR1@120", "--requeue", "--export=NONE"} <= set(options)
    assert nothing_is_written()
    words = program_of(out)
    assert words[:5] == ["allranks", "train", "digits", "--device", "cuda"]
    assert words[5:11] == ["--place", "slurm", "--nodes", "1", "--ranks", "6"]
    assert words[11] == "--run-dir" and words[12].startswith(f"{Path.cwd()}/runs/digits-")


@pytest.mark.parametrize(
    ("given", "line"),
    [("20", "00:20:00"), ("90", "01:30:00"), ("2-12", "2-12:00:00"), ("90s", "00:01:30")],
)
def test_a_plain_number_is_minutes_as_for_sbatch(door: Door, given: str, line: str) -> None:
    _, out, err = door(*ML, "--time", given, "--dry-run", *CUDA)
    assert f"--time={line}" in read_script(out, old=False), err


def test_the_words_are_completed_and_never_said_twice(door: Door) -> None:
    words = ("--ranks", "12", "--nodes=2", "--place", "slurm", "--run-dir", "runs/a")
    _, out, _ = door(*ML, "--dry-run", *CUDA, *words)
    assert program_of(out)[5:] == list(words)
    options = read_script(out, old=False)
    assert {"--nodes=2", "--ntasks-per-node=6"} <= set(options)
    assert f"--output={Path.cwd()}/runs/a.slurm-%j.out" in options


def test_a_command_keeps_its_own_words(door: Door) -> None:
    Path("train.py").touch()
    command = ("--", "python", "train.py", "--nodes", "7", "--place", "x y")
    words = ("--gpus-per-node", "2", "--run-dir", "r", "--dry-run", "--", "run", *command)
    _, out, _ = door(*ML, *words)
    added = ["--place", "slurm", "--nodes", "1", "--ranks", "2"]
    run_dir = str(Path.cwd() / "r")
    assert program_of(out) == ["allranks", "run", *added, "--run-dir", run_dir, *command]
    assert "--job-name=train" in read_script(out, old=False)


def test_the_two_dashes_may_be_left_out(door: Door) -> None:
    first = door(*ML, "--run-dir", "r", "--dry-run", *CUDA)
    assert door(*ML, "--run-dir", "r", "--dry-run", *CUDA[1:]) == first


def test_a_rank_may_be_a_task_of_slurm(door: Door) -> None:
    """The whole script; the golden file was read line by line, and no test writes it."""
    words = ("--per-rank", "--nodes", "2", "--time", "2:00:00", "--run-dir", "r", "--dry-run")
    code, out, err = door(*ML, *words, *CUDA)
    assert (code, err) == (0, "")
    golden = Path(__file__).with_name("golden") / "per-rank.sbatch"
    on_one_line = out.replace(" \\\n    ", " ").rstrip()  # where it breaks follows the folder
    assert on_one_line.replace(str(Path.cwd()), "/scratch/me") == golden.read_text().rstrip()


def test_a_command_may_have_a_task_for_every_rank_too(door: Door) -> None:
    _, out, _ = door(*ML, "--per-rank", "--dry-run", "--", "run", "--", "python", "-V")
    assert "--per-rank" in program_of(out)


def test_a_script_of_ones_own_is_there_and_commits_nothing(door: Door) -> None:
    code, out, err = door(*ML, "--dry-run", "--", "run", "--", "python", "-u", "gone.py", "x.py")
    assert (code, out) == (2, "") and "no file gone.py" in err
    inside = (
        "--container",
        "a.sif",
        "--dry-run",
        "--",
        "run",
        "--",
        "python",
        "/opt/inside.py",
    )
    assert door(*ML, *inside)[0] == 0
    Path("here.py").write_text("")
    code, out, _ = door(*ML, "--dry-run", "--time", "60", "--", "run", "--", "python", "here.py")
    assert code == 0 and "the same signal." in out and "commit" not in out
    assert "commits a checkpoint" in door(*ML, "--dry-run", *CUDA)[1]


def test_a_job_that_can_lose_a_node_is_not_killed_with_it(door: Door) -> None:
    assert "#SBATCH --no-kill" not in door(*ML, "--dry-run", *CUDA)[1]
    assert "#SBATCH --no-kill" in door(*ML, "--dry-run", *CUDA, "--max-restarts", "3")[1]


def test_strategies_with_many_devices_take_one_rank(door: Door) -> None:
    words = ("--strategy", "dp:replicas=6")
    _, out, _ = door(*ML, "--dry-run", *CUDA, *words)
    options = read_script(out, old=False)
    assert {"--ntasks-per-node=1", "--cpus-per-task=42", "--gres=gpu:6"} <= set(options)


def test_lines_of_the_program(door: Door) -> None:
    words = ("--module", "a b", "--module", "c", "--setup", "export X=1", "--sbatch=--qos=debug")
    _, out, _ = door(*ML[:3], *words, "--venv", "my env", "--dry-run", *CUDA)
    assert "module load 'a b' c\n" in out
    assert "\nexport X=1\n" in out
    assert f"\nsource '{Path.cwd()}/my env/bin/activate'\n" in out
    assert "--qos=debug" in read_script(out, old=False)
    _, out, _ = door(*ML, "--module", "none", "--container", "x.sif", "--dry-run", *CUDA)
    assert "module" not in out
    assert program_of(out)[:5] == ["singularity", "exec", "--nv", f"{Path.cwd()}/x.sif", "allranks"]


@pytest.mark.parametrize(
    ("asked", "extra", "flag"),
    [
        ("--gres=gpu:a100:{count}", (), "--nv"),
        ("--gres=gpu:mi250x:{count}", (), "--rocm"),
        ("--gpus-per-node={count}", ("--constraint=MI300A",), "--rocm"),
        ("--gpus-per-node={count}", ("--mail-user=amd@mi.org",), "--nv"),
    ],
)
def test_a_container_sees_the_gpus_of_its_maker(
    asked: str, extra: tuple[str, ...], flag: str
) -> None:
    site = load_site("template")
    partition = replace(site.partitions["gpu"], gpu_request=asked)
    site = replace(site, container=(), partitions={"gpu": partition})
    options = SlurmOptions(partition="gpu", account="a", container="/x.sif", options=extra)
    request = make_request(site, options, command=(), folder="/", run_dir="/r")
    assert request.container == ("apptainer", "exec", flag, "/x.sif")


def test_the_account_of_the_shell_is_written_down(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "project_7")
    assert "#SBATCH --account=project_7\n" in door(*ML, "--dry-run", *CUDA)[1]
    assert "--account=mine" in door(*ML, "--account", "mine", "--dry-run", *CUDA)[1]


def test_the_virtual_environment_of_this_command_is_that_of_the_job(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", "/opt/my venv")
    assert "source '/opt/my venv/bin/activate'" in door(*ML[:3], "--dry-run", *CUDA)[1]
    assert "source" not in door(*ML, "--dry-run", *CUDA)[1]


def test_a_script_is_written_for_its_owner_and_sent(door: Door, cluster: Path) -> None:
    code, out, err = door("submit", "--venv", "none", "--nodes", "2", "--", "train", "digits")
    assert (code, out) == (0, "4711\n")
    row = json.loads(cluster.read_text())
    assert row["mode"] == "0o600"
    assert row["options"] == ["--parsable", "--export=NONE"]
    assert {"--partition=cpu", "--nodes=2", "--mem=2695"} <= set(row["new"])
    script = Path(row["file"])
    assert script.parent == Path.cwd() / "runs" and script.suffix == ".sbatch"
    assert err == f"job 4711: sent; output in {str(script)[:-7]}.slurm-4711.out\n"
    run_dir = program_of(script.read_text())[-1]
    assert str(script) == f"{run_dir}.sbatch" and not Path(run_dir).exists()


@pytest.mark.usefixtures("cluster")
def test_a_job_is_followed_to_its_end(door: Door) -> None:
    Path("runs").mkdir()
    Path("runs/a.slurm-4711.out").write_bytes(b"accuracy 0.97\n\x1b[2Jlast")
    words = ("--venv", "none", "--run-dir", "runs/a", "--follow", "--json", "--", "train", "digits")
    code, out, err = door("submit", *words)
    assert code == 0
    *lines, last = out.splitlines()
    assert lines == ["accuracy 0.97", "\\x1b[2Jlast"]
    facts = json.loads(last)
    assert (facts["job_id"], facts["state"], facts["exit_code"]) == (4711, "COMPLETED", 0)
    assert facts["run_dir"] == str(Path.cwd() / "runs/a")
    assert err.splitlines()[-1] == "job 4711: completed"


def test_a_dry_run_as_an_object(door: Door) -> None:
    _, out, _ = door(*ML, "--dry-run", "--json", *CUDA)
    facts = json.loads(out)
    assert facts["text"].startswith("#!/bin/bash -l\n")
    assert (facts["cluster"], facts["partition"], facts["ranks"]) == ("taurus-ml", "ml", 6)
    assert facts["job_id"] is None


# --- what is refused, with nothing written ----------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("submit", "--", "train", "digits"), "no Slurm on this machine"),
        (("submit", "--cluster", "x", "--", "train", "digits"), "cluster 'x'"),
        (ML, "no `train` or `run` after the --"),
        ((*ML, "--", "check", "digits"), "'check'"),
        ((*ML, "--", "train"), "no PROGRAM"),
        ((*ML, "--", "train", "digit", "--device", "cuda"), "did you mean 'digits'?"),
        ((*ML, "--", "train", "no.py", "--device", "cuda"), "no file no.py in"),
        ((*ML, "--", "train", "no.py:Task", "--device", "cuda"), "no file no.py in"),
        ((*ML, *CUDA, "--lr", "3"), "No such option"),
        ((*ML, *CUDA, "--precision", "fp7"), "--precision fp7"),
        ((*ML, *CUDA, "--strategy", "ddq"), "did you mean 'ddp"),
        ((*ML, *CUDA, "--set", "lr"), "--set lr"),
        ((*ML, *CUDA, "--place", "local"), "--place local in the words of `train`"),
        ((*ML, "--nodes", "2", *CUDA, "--nodes", "3"), "--nodes 3 in the words of `train`"),
        ((*ML, "--ranks-per-node", "6", *CUDA, "--ranks", "7"), "--ranks 7 in the words"),
        ((*ML, "--nodes", "2", *CUDA, "--ranks", "7"), "7 ranks do not share out evenly over 2"),
        ((*ML, "--run-dir", "a", *CUDA, "--run-dir", "b"), "--run-dir b in the words"),
        ((*ML, *CUDA, "--dry-run"), "--dry-run after `submit -- train`"),
        ((*ML, *CUDA, "--sweep", "lr=1,2"), "No such option '--sweep'"),
        ((*ML, "--", "run", "--nnodes", "2", "--", "x"), "--nnodes after `submit -- run`"),
        ((*ML, "--", "train", "digits"), "6 GPUs on a node, and --device cpu"),
        ((*ML, "--gpus-per-node", "0", *CUDA), "no GPU asked for"),
        ((*ML, "--mem", "1000", "--mem-per-gpu", "10", *CUDA), "keep one of them: --mem 1000"),
        ((*ML, "--mem", "0", *CUDA), "'0' is no memory"),
        ((*ML, "--time", "8d", *CUDA), "at most 7-00:00:00"),
        ((*ML, "--time", "soon", *CUDA), "'soon' is no time limit"),
        ((*ML, "--name", "a\nb", *CUDA), "a character that is not printed"),
        ((*ML, *CUDA, "--set", "lr=1\n2"), "a character that is not printed"),
        ((*ML, "--sbatch=--wrap=x", *CUDA), "--wrap, which takes a script"),
        ((*ML, "--partition", "gpu2", *CUDA), "Taurus ml (ZIH, TU Dresden) has ml"),
        (("submit", "--cluster", "puhti", "--partition", "gpu", *CUDA), "--account PROJECT"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["send", "dry"])
def test_a_refused_job_leaves_nothing(
    door: Door, words: tuple[str, ...], says: str, dry: tuple[str, ...]
) -> None:
    code, out, err = door(words[0], *dry, *words[1:])
    assert (code, out) == (2, "")
    assert says in err
    assert nothing_is_written()


def test_a_run_folder_that_is_none_is_refused(door: Door) -> None:
    Path("a").mkdir()
    Path("a/mine.txt").touch()
    code, _, err = door(*ML, "--run-dir", "a", "--dry-run", *CUDA)
    assert code == 2
    assert "something is there already, which is no run folder" in err


def test_a_run_is_gone_on_with_by_what_it_says_itself(door: Door) -> None:
    """Program and ranks come from its job, and so does what may not change."""
    Path("a").mkdir()
    Path("a/job.toml").write_text(
        'schema = 1\nprogram = "digits"\nstrategy = "ddp"\nranks = 3\ndevice = "cuda"\n'
    )
    code, out, err = door(*ML, "--dry-run", "--", "train", "--run-dir", "a")
    assert (code, err) == (0, "")
    assert "--ntasks-per-node=3" in read_script(out, old=False)
    assert program_of(out)[:4] == ["allranks", "train", "--run-dir", "a"]
    code, _, err = door(*ML, "--dry-run", "--", "train", "--run-dir", "a", "--seed", "7")
    assert code == 2
    assert "seed" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [(("--venv", "no"), "no/bin/activate"), (("--container", "no.sif"), "no.sif")],
)
def test_what_is_not_here_is_found_before_the_queue(
    door: Door, words: tuple[str, ...], says: str
) -> None:
    code, _, err = door("submit", "--cluster", "taurus-ml", *words, *CUDA)
    assert code == 2
    assert says in err
    assert nothing_is_written()


def test_a_job_that_slurm_refuses_leaves_nothing(door: Door, tmp_path: Path) -> None:
    (tmp_path / "bin" / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: Invalid account or account/partition' >&2\nexit 1\n"
    )
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    code, out, err = door(*ML, "--run-dir", "runs/deep/a", *CUDA)
    assert (code, out) == (3, "")
    assert "Invalid account or account/partition" in err
    assert nothing_is_written()


def test_a_script_that_was_there_comes_back_when_slurm_refuses(door: Door, tmp_path: Path) -> None:
    Path("a.sbatch").write_text("before")
    code, _, err = door(*ML, "--run-dir", "a", *CUDA)
    assert (code, "there is no `sbatch` on this machine" in err) == (3, True)
    assert os.listdir() == ["a.sbatch"]
    assert Path("a.sbatch").read_text() == "before"


@pytest.mark.usefixtures("cluster")
def test_live_facts_refuse_as_a_profile_does(door: Door) -> None:
    words = ("submit", "--venv", "none", "--time", "4d", "--", "train", "digits")
    code, _, err = door(*words)
    assert code == 2
    assert "partition cpu of cluster borealis: at most 3-00:00:00" in err
    assert "do:    --time 3-00:00:00" in err
    assert nothing_is_written()

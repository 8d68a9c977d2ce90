"""The plugin's marker `ranks`: bodies run on ranks; what fails there fails that test alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from allranks.testing import NotSame, shard
from allranks.testing.same import run_body
from conftest import ROOT

OPTIONS = {"backend": "gloo", "timeout": "60"}
A_LOCK = threading.Lock()
THREE = 3


def three_times(value: int) -> int:
    return THREE * value


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("factor", [2])
def test_a_body_gets_its_rank_and_other_arguments(ranks: Any, factor: int, tmp_path: Path) -> None:
    total = torch.tensor(factor * ranks.rank)
    dist.all_reduce(total)
    assert three_times(int(total)) == three_times(factor * sum(range(ranks.world)))
    assert tmp_path.is_dir()
    assert os.environ["WORLD_SIZE"] == str(ranks.world)


@pytest.mark.ranks(2, backend="shared_memory")
def test_ranks_may_talk_over_shared_memory(ranks: Any) -> None:
    assert dist.get_backend() == "shared_memory"
    dist.barrier()


def body(server: Any, function: Any, *numbers: Any, **options: Any) -> tuple[str, str]:
    values = {"ranks": numbers[0] if numbers else None}
    return run_body(server, function, values, numbers, OPTIONS | options)


def test_the_first_rank_that_raises_is_shown_with_its_line(ranks_server: Any) -> None:
    def raises(ranks: Any) -> None:
        if ranks.rank == 1:
            raise ValueError("no such weight")
        dist.barrier()

    text, _ = body(ranks_server, raises, 2)
    assert text.startswith("rank 1 of 2 failed")
    assert f'File "{__file__}"' in text
    assert text.rstrip().endswith("ValueError: no such weight")


def test_a_rank_that_is_killed_or_leaves_is_named(ranks_server: Any) -> None:
    def leaves(ranks: Any) -> None:
        if ranks.rank == 1:
            os._exit(0)
        dist.barrier()

    text, _ = body(ranks_server, leaves, 2)
    assert text.startswith("rank 1 of 2 left with exit code 0 before the end of the test")


def test_a_process_that_is_left_behind_fails_the_test(ranks_server: Any) -> None:
    def forks(ranks: Any) -> None:
        subprocess.Popen(["sleep", "1000"])

    text, _ = body(ranks_server, forks, 1)
    assert "the test left a process behind" in text
    assert "sleep 1000" in text


@pytest.mark.slow
def test_a_rank_that_hangs_is_shown_with_the_stacks_of_all(ranks_server: Any) -> None:
    def hangs(ranks: Any) -> None:
        while ranks.rank == 1:
            time.sleep(0.1)
        dist.barrier()

    text, _ = body(ranks_server, hangs, 2, timeout=10)
    assert text.startswith("no progress for 10 s on 2 ranks\nrank 1 is in no collective\n")
    assert "rank 0 waits in a collective, called by" in text
    assert "in hangs" in text


def test_a_skip_on_a_rank_skips_the_test(ranks_server: Any) -> None:
    def skips(ranks: Any) -> None:
        pytest.skip("no GPU")

    assert body(ranks_server, skips, 2) == ("", "no GPU")


@pytest.mark.parametrize(
    ("numbers", "options", "words"),
    [
        ((), {}, "do:    give 1 or more of them"),
        ((0,), {}, "found: [0] as numbers of ranks"),
        ((2,), {"backend": "glo"}, "did you mean 'gloo'?"),
        ((2,), {"timeout": -1}, "found: timeout=-1"),
        ((2,), {"world": 3}, "found: ['world']"),
        ((2,), {}, "found: it uses 'A_LOCK', a lock"),
    ],
)
def test_what_cannot_run_is_refused(
    numbers: Any, options: Any, words: str, ranks_server: Any
) -> None:
    text, _ = body(ranks_server, lambda ranks: A_LOCK, *numbers, **options)
    assert text.startswith("asked: ")
    assert words in text


BAD_STEPS = {
    "the step function returned None": lambda rank, world: None,
    "'a0' on rank 0 alone, 'a1' on rank 1 alone": lambda rank, world: {f"a{rank}": 1.0},
    "'n2' in one of them alone": lambda rank, world: {"n1": 1, f"n{world}": 1},
    "(3,) on rank 0, (4,) on rank 1": lambda rank, world: {"x": torch.ones(3 + rank)},
    "the step function yielded 1 times": lambda rank, world: iter([{"x": 1}]),
    "str: 'text'": lambda rank, world: {"x": "text"},
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("words", BAD_STEPS)
def test_steps_that_cannot_be_compared_are_refused(words: str, same_on_ranks: Any) -> None:
    with pytest.raises(Exception, match=r"^asked: ") as refused:
        same_on_ranks(BAD_STEPS[words], steps=2)
    assert f"found: {words}" in str(refused.value)


def test_one_rank_that_differs_is_named(same_on_ranks: Any) -> None:
    def step(rank: int, world: int) -> Any:
        whole = torch.arange(6.0)
        begin, end = 6 * rank // world, 6 * (rank + 1) // world
        part = shard(whole[begin:end], index=(slice(begin, end),), shape=(6,))
        return {"whole": part, "count": 1 if rank == 1 else 0}

    with pytest.raises(NotSame, match=r"differs: rank 1 \(rank 0 agrees\), by 1 of its norm"):
        same_on_ranks(step)


def test_what_has_32_bits_elsewhere_is_computed_in_64(same_on_ranks: Any) -> None:
    rows, layer = np.linspace(-1, 1, 28, dtype=np.float32).reshape(7, 4), torch.nn.Linear(4, 3)

    def step(rank: int, world: int) -> Any:
        mine = torch.from_numpy(rows).tensor_split(world)[rank]
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            (layer(mine).float().square().sum() / len(rows)).backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)
        return {"grad": [parameter.grad for parameter in layer.parameters()]}

    same_on_ranks(step, ranks=(1, 2, 3))


def test_bits_are_compared_where_asked(same_on_ranks: Any) -> None:
    def step(rank: int, world: int) -> Any:
        return {"x": torch.tensor([1.0, 1 + (2.0**-23 if world > 1 else 0)])}

    same_on_ranks(step, precision="own")
    with pytest.raises(NotSame, match="1 of 2 elements differ in their bits"):
        same_on_ranks(step, bitwise=True)


INNER = """
import pytest, sys, torch, torch.distributed as dist

@pytest.mark.ranks(1, 2)
def test_body(ranks):
    assert dist.get_backend() == "shared_memory"
    assert "colorsys" in sys.modules  # it was imported once, before the fork

def test_step(same_on_ranks):
    same_on_ranks(lambda rank, world: {"x": torch.ones(2)})

def test_that_differs(same_on_ranks):
    same_on_ranks(lambda rank, world: {"x": torch.ones(2) * world})

@pytest.mark.ranks(2)
def test_that_fails(ranks):
    assert ranks.rank == 0
"""


@pytest.mark.slow
def test_it_works_in_a_run_of_its_own_under_xdist(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(INNER)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nranks_backend = shared_memory\nranks_preload = colorsys\n"
    )
    words = [sys.executable, "-m", "pytest", "-n", "1", "-p", "allranks.testing.plugin"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 failed, 3 passed" in done.stdout, done.stdout
    assert "step 0, tensor 'x': not the same on 2 ranks as on 1 rank" in done.stdout
    assert "rank 1 of 2 failed" in done.stdout
    assert "assert ranks.rank == 0" in done.stdout


def test_other_tests_load_neither_torch_nor_allranks() -> None:
    code = (
        "import sys, allranks.testing.plugin\n"
        "ours = {m for m in sys.modules if m.partition('.')[0] == 'allranks'}\n"
        "assert ours == {'allranks', 'allranks.testing', 'allranks.testing.plugin'}, ours\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["pytest11"] == {"allranks.testing.plugin": "allranks.testing.plugin"}

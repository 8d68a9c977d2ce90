"""Slurm's variables: folded lists of nodes and tasks, what a step changes, what cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import RequestError
from allranks.launcher.slurm.allocation import (
    FIRST_PORT,
    PORTS,
    Allocation,
    expand_counts,
    expand_nodes,
    first_port,
)

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
}
STEP = JOB | {
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def allocation(variables: dict[str, str]) -> Allocation:
    found = Allocation.from_environment(variables)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("folded", "names"),
    [
        ("login1", ("login1",)),
        ("r[01-03,07]g[1-2],login1", (*(f"r{r}g{g}" for r in ("01", "02", "03", "07") for g in (1, 2)), "login1")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("n[09-11]", ("n09", "n10", "n11")),
        ("n[098-101]-ib", ("n098-ib", "n099-ib", "n100-ib", "n101-ib")),
        ("taurusi[2045-2046,2108],taurusml1", ("taurusi2045", "taurusi2046", "taurusi2108", "taurusml1")),
        ("a,b.domain.org,c-3", ("a", "b.domain.org", "c-3")),
        ("sh04-10n[05]", ("sh04-10n05",)),
    ],
)  # fmt: skip
def test_lists_of_nodes_are_unfolded(folded: str, names: tuple[str, ...]) -> None:
    assert expand_nodes(folded) == names


@given(
    prefix=st.from_regex(r"[a-z]{1,8}", fullmatch=True),
    ranges=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 5)), min_size=1, max_size=5),
    width=st.integers(1, 4),
)
def test_what_is_folded_comes_back(prefix: str, ranges: list[tuple[int, int]], width: int) -> None:
    parts = ",".join(f"{a:0{width}}-{a + n:0{width}}" for a, n in ranges)
    names = [f"{prefix}{i:0{width}}" for a, n in ranges for i in range(a, a + n + 1)]
    assert list(expand_nodes(f"{prefix}[{parts}]")) == names


@pytest.mark.parametrize(
    "text",
    ["", ",", "n1,", "n[1-", "n[1-2", "n1-2]", "n[2-1]", "n[a-b]", "n[]", "n[1,,2]", "n 1", "n[1-999999999]", "a[1-999]b[1-999]"],
)  # fmt: skip
def test_lists_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        expand_nodes(text)
    assert refused.value.found == repr(text)


def test_counts_are_unfolded() -> None:
    assert expand_counts("2(x3),1") == (2, 2, 2, 1)
    assert expand_counts("4") == (4,)
    assert expand_counts("1,2,3(x2)") == (1, 2, 3, 3)
    assert sum(expand_counts("128(x1000)")) == 128_000


@pytest.mark.parametrize("text", ["", "2(x3", "2x3", "2(3)", "-1", "2,,1", "1(x999999999)"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        expand_counts(text)


def test_outside_of_slurm_there_is_no_allocation() -> None:
    assert Allocation.from_environment({}) is None
    assert (
        Allocation.from_environment({"SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": ""}) is None
    )


def test_a_batch_script_is_no_task_of_its_job() -> None:
    """Slurm sets SLURM_PROCID=0 there too, and the number of tasks that were asked for."""
    found = allocation(JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "7"})
    assert (found.job_id, found.step_id) == (4711, None)
    assert found.nodes == ("n1", "n2", "n3", "n4")
    assert (found.tasks_per_node, found.size) == ((2, 2, 2, 1), 7)
    assert (found.rank, found.local_rank, found.node) == (None, None, None)


def test_inside_a_step_its_own_variables_count() -> None:
    found = allocation(STEP)
    assert (found.step_id, found.nodes, found.tasks_per_node) == (3, ("n2", "n3"), (1, 2))
    assert (found.rank, found.local_rank, found.node, found.size) == (2, 1, 1, 3)


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "4294967292", "4294967293"])
def test_the_steps_of_slurm_itself_are_none(step: str) -> None:
    """The shell that salloc opens on a node, the batch script, and others have ids from the top."""
    assert allocation(STEP | {"SLURM_STEP_ID": step}).step_id is None


def test_ntasks_alone_is_enough() -> None:
    """`--ntasks` without `--ntasks-per-node`, where others raise."""
    only = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "6"}
    assert allocation(only).tasks_per_node == (3, 3)
    assert allocation(only | {"SLURM_TASKS_PER_NODE": "4,2"}).tasks_per_node == (4, 2)
    assert allocation(only | {"SLURM_NTASKS_PER_NODE": "3"}).tasks_per_node == (3, 3)


def test_the_old_names_are_understood() -> None:
    old = {"SLURM_JOBID": "5", "SLURM_NODELIST": "n1", "SLURM_NPROCS": "4", "SLURM_STEPID": "0"}
    task = {"SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NODEID": "0"}
    found = allocation(old | task)
    assert (found.job_id, found.step_id, found.nodes, found.size) == (5, 0, ("n1",), 4)


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "2"}, 2),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:1"}, 3),
        ({"SLURM_GPUS_PER_NODE": "gpu:a100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "gpu:a100:2,gpu:2"}, 4),
        ({"SLURM_JOB_GPUS": "0,1,4"}, 3),
        ({"SLURM_STEP_GPUS": "7", "SLURM_JOB_GPUS": "6,7"}, 1),
        ({"SLURM_GPUS_ON_NODE": "1", "SLURM_GPUS_PER_NODE": "4"}, 1),
    ],
)
def test_gpus_where_slurm_says_them(variables: dict[str, str], gpus: int | None) -> None:
    assert allocation(JOB | variables).gpus_per_node == gpus


@pytest.mark.parametrize(
    ("variables", "cpus"),
    [
        ({}, None),
        ({"SLURM_CPUS_PER_TASK": "7"}, 7),
        ({"SLURM_TRES_PER_TASK": "cpu=4"}, 4),
        ({"SLURM_TRES_PER_TASK": "gres/gpu=1,cpu:16"}, 16),
    ],
)
def test_cpus_of_a_task(variables: dict[str, str], cpus: int | None) -> None:
    assert allocation(JOB | variables).cpus_per_task == cpus


def test_time_and_restarts() -> None:
    found = allocation(JOB | {"SLURM_JOB_END_TIME": "1777355287", "SLURM_RESTART_COUNT": "2"})
    assert (found.end_time_s, found.restart_count) == (1777355287, 2)
    assert (allocation(JOB).end_time_s, allocation(JOB).restart_count) == (None, 0)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (JOB | {"SLURM_JOB_ID": "x"}, "'x'"),
        ({"SLURM_JOB_ID": "1"}, "SLURM_JOB_NODELIST is not set"),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}, "neither SLURM_TASKS_PER_NODE nor"),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "3"}, "SLURM_NTASKS=3, 2 nodes"),
        (JOB | {"SLURM_TASKS_PER_NODE": "2(x2)"}, "2 nodes, and 4 in the list"),
        (JOB | {"SLURM_JOB_END_TIME": "soon"}, "'soon'"),
        (JOB | {"SLURM_GPUS_PER_NODE": "all"}, "'all'"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4"),
        (STEP | {"SLURM_PROCID": "3"}, "SLURM_PROCID=3"),
        (STEP | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        (STEP | {"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2"),
        (STEP | {"SLURM_LOCALID": ""}, "SLURM_LOCALID=None"),
        (STEP | {"SLURM_PROCID": "-1"}, "'-1'"),
    ],
)  # fmt: skip
def test_variables_that_cannot_be_are_refused(variables: dict[str, str], found: str) -> None:
    with pytest.raises(RequestError) as refused:
        Allocation.from_environment(variables)
    assert found in refused.value.found
    assert all(refused.value.to_data().values())


def test_a_task_of_another_component_is_told_what_is_not_supported() -> None:
    """Of a heterogeneous job the tasks are counted over all of its components."""
    with pytest.raises(RequestError, match="several components of a heterogeneous job"):
        Allocation.from_environment(STEP | {"SLURM_PROCID": "3", "SLURM_HET_SIZE": "2"})


def test_jobs_with_the_same_last_digits_get_two_ports() -> None:
    assert first_port(11234, 0) != first_port(21234, 0)
    assert first_port(11234, None) != first_port(21234, None)


@given(job=st.integers(0, 2**31), step=st.none() | st.integers(0, 10_000))
def test_ports_are_in_a_safe_range(job: int, step: int | None) -> None:
    """Above what needs root, below what Linux hands out to clients (32768) and Slurm's own."""
    assert FIRST_PORT <= first_port(job, step) < FIRST_PORT + PORTS <= 32768


@given(job=st.integers(0, 2**31))
def test_jobs_of_one_time_and_steps_of_one_job_get_ports_of_their_own(job: int) -> None:
    assert len({first_port(other, 0) for other in range(job, job + 1000)}) == 1000
    assert len({first_port(job, step) for step in (None, *range(1000))}) == 1001
    near = {first_port(other, step) for other in range(job, job + 20) for step in range(20)}
    assert len(near) == 400

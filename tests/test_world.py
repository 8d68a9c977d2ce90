"""Who am I: the variables of a rank, written and read in one place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import RequestError
from allranks.launcher.heartbeat import Group
from allranks.launcher.world import World


@given(size=st.integers(1, 64), data=st.data(), store=st.text(max_size=10))
def test_a_world_comes_back_from_its_variables(size: int, data: st.DataObject, store: str) -> None:
    rank = data.draw(st.integers(0, size - 1))
    local_size = data.draw(st.integers(1, size))
    world = World(rank, size, rank % local_size, local_size, rank // local_size, store)
    assert World.from_environment(world.variables()) == world
    assert world.is_leader == (rank == 0)


def test_a_role_is_told_only_where_there_are_roles() -> None:
    server = World(3, 4, 3, 4, role="server", role_index=1)
    assert World.from_environment(server.variables()) == server
    assert not [name for name in World(3, 4, 3, 4).variables() if "ROLE" in name]


def test_without_variables_one_rank_is_alone() -> None:
    assert World.from_environment({}) == World(0, 1, 0, 1, 0, "")


def test_one_node_is_assumed_where_a_launcher_names_no_local_rank() -> None:
    world = World.from_environment({"RANK": "2", "WORLD_SIZE": "4"})
    assert (world.local_rank, world.local_size) == (2, 4)


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (World.from_environment().rank, World.from_environment().size) == (1, 3)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"RANK": "one"}, "invalid literal for int() with base 10: 'one'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "invalid literal for int() with base 10: ''"),
        ({"LOCAL_RANK": "0.5"}, "invalid literal for int() with base 10: '0.5'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4, WORLD_SIZE=4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK=-1, WORLD_SIZE=4"),
        ({"RANK": "1"}, "RANK=1, WORLD_SIZE=1"),
        ({"WORLD_SIZE": "0"}, "RANK=0, WORLD_SIZE=0"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(variables: dict[str, str], found: str) -> None:
    with pytest.raises(RequestError) as refused:
        World.from_environment(variables)
    assert refused.value.found == found


def test_a_world_size_without_a_rank_is_refused() -> None:
    """Every process would be rank 0 of many."""
    with pytest.raises(RequestError) as refused:
        World.from_environment({"WORLD_SIZE": "4"})
    assert refused.value.found == "no RANK in the environment"
    assert World.from_environment({"WORLD_SIZE": "1"}).size == 1
    assert World.from_environment({"WORLD_SIZE": "4", "RANK": "3"}).rank == 3


def test_a_group_meets_beside_the_first_whatever_the_folder_is_called() -> None:
    world = World(1, 3, store="/runs/a-group-1/run/.store-0")
    for number in (1, 12):
        world = world.in_group(Group(number, -1, (0, 1)))
        assert world.store == f"/runs/a-group-1/run/.store-0-group-{number}"

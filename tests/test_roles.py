"""Roles: which processes a job has, what they are called, and which of them it can do without."""

from __future__ import annotations

import pytest

from allranks.cli.display.following import anomalies_in, in_words
from allranks.cli.display.placement import place_ranks
from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.launcher.plan import Seat, Shape, for_all_processes, plan_of, shares
from allranks.launcher.world import Visible, World
from allranks.strategies.cards import CARDS
from allranks.strategies.resolve import strategy_spec

ALL = "parameter-server:servers=2,evaluator=yes"


@pytest.mark.parametrize("name", sorted(set(CARDS) - {"parameter-server", "decoupled", "ps"}))
def test_other_strategies_have_trainers_alone(name: str) -> None:
    process_set = strategy_spec(name, 3).process_set
    assert process_set.are_all_trainers and process_set.size == 3 and not process_set.helpers
    assert [process_set.name_of(rank) for rank in range(3)] == ["rank 0", "rank 1", "rank 2"]
    assert not any(process_set.survives_loss_of(rank, {0, 1, 2}) for rank in range(3))


def test_a_job_with_servers_has_all_roles_in_one_order() -> None:
    process_set = strategy_spec(ALL, 2).process_set
    assert str(process_set) == "1 chief, 2 workers, 2 servers, 1 evaluator"
    assert [process_set.name_of(rank) for rank in range(process_set.size)] == [
        "chief (rank 0)",
        "worker 0 (rank 1)",
        "worker 1 (rank 2)",
        "server 0 (rank 3)",
        "server 1 (rank 4)",
        "evaluator (rank 5)",
    ]
    assert process_set.helpers == {1, 2, 3, 4}
    assert strategy_spec("parameter-server", 1).process_set.size == 3


def test_a_worker_is_spared_while_another_is_left_and_a_server_never() -> None:
    process_set = strategy_spec(ALL, 2).process_set
    everyone = set(range(process_set.size))
    assert [
        process_set.survives_loss_of(rank, everyone - {rank}) for rank in range(process_set.size)
    ] == [*(False, True, True, False, False, True)]
    assert not process_set.survives_loss_of(2, everyone - {1, 2}), "it was the last"


def test_learners_come_and_go_and_their_synchronizer_comes_back() -> None:
    process_set = strategy_spec("decoupled:least=2,rejoins=5", 3).process_set
    assert str(process_set) == "1 synchronizer, 3 learners"
    assert process_set.helpers == process_set.outlive_nodes == {1, 2, 3}
    assert process_set.survives_loss_of(2, {0, 1, 3}) and not process_set.survives_loss_of(
        2, {0, 1}
    )
    first, second = process_set.members[:2]
    assert (first.role.resumes, first.role.rejoins) == (True, 0)
    assert (second.role.resumes, second.role.rejoins) == (False, 5)


def test_on_several_nodes_the_others_are_where_the_first_worker_is() -> None:
    job = Job(strategy=ALL, ranks=3)
    assert for_all_processes(job, ["a", "a", "b"]) == ["a", "a", "a", "b", "a", "a", "a"]
    assert for_all_processes(job, ["b"]) == ["b"] * 5, "the other node is lost"
    assert for_all_processes(Job(strategy="ddp", ranks=3), ["a", "a", "b"]) == ["a", "a", "b"]


def test_servers_may_be_beside_the_workers_of_all_nodes_in_turn() -> None:
    job = Job(strategy="ps:servers=2,servers_on=all,evaluator=yes", ranks=3)
    found = for_all_processes(job, ["a", "b", "c"])
    assert found == ["a", "a", "b", "a", "b", "c", "a"], "scheduler, servers, workers, evaluator"
    assert for_all_processes(job, ["b"]) == ["b"] * 5, "the others are lost"


def test_servers_may_have_nodes_of_their_own() -> None:
    job = Job(strategy="ps:servers=2,servers_on=own,evaluator=yes", ranks=3, nodes=4)
    assert job.nodes_apart == 2 and shares(3, 4, (), job.nodes_apart) == (2, 1, 0, 0)
    assert shares(3, 4, (1, 2, 9, 9), 2) == (1, 2, 0, 0), "as their hosts have slots"
    found = for_all_processes(job, ["a", "a", "b"], ["c", "d"])
    assert found == ["a", "c", "d", "a", "a", "b", "a"], "scheduler, servers, workers, evaluator"
    assert for_all_processes(job, ["a"], ["d"]) == ["a", "d", "d", "a", "a"], "c is lost"
    assert for_all_processes(job, ["a", "b"]) == ["a", "a", "b", "a", "b", "a"], "so is d"
    assert Job(strategy="ps:servers=2", ranks=3).nodes_apart == Job().nodes_apart == 0


def test_of_the_processes_of_a_node_its_ranks_alone_are_counted_for_devices() -> None:
    job = Job("digits", strategy="ps:servers=2,evaluator=yes", ranks=3, nodes=2, run_dir="/x")
    seats = [Seat(node) for node in (0, 0, 0, 0, 1, 0, 0)]  # scheduler, servers, workers, evaluator
    worlds = [rank.world for rank in plan_of(job, Shape({}, 8, 8), Visible(), seats).ranks]
    found = [(world.local_index, world.local_ranks) for world in worlds]
    assert found == [(-1, 2), (-1, 2), (-1, 2), (0, 2), (0, 1), (1, 2), (-1, 2)]
    told = [World.from_environment(world.variables()) for world in worlds]
    assert [(world.local_index, world.local_ranks) for world in told] == found


def test_servers_are_not_asked_what_they_hold() -> None:
    job = Job("digits-keras", strategy=ALL, ranks=2, run_dir="/somewhere/run", threads=1)
    made = plan_of(job, Shape({}, 8, 8), Visible())
    with pytest.raises(RequestError, match="1 chief, 2 workers, 2 servers, 1 evaluator"):
        place_ranks(made, server=None)  # type: ignore[arg-type]


def test_who_is_lost_is_told_by_name() -> None:
    event = {"event": "worker_lost", "rank": 1, "who": "worker 0 (rank 1)", "cause": "killed"}
    assert in_words(event) == ["note: worker 0 (rank 1) is lost: killed; the others go on"]
    assert anomalies_in(event) == [(1, "lost: killed")]
    event = {"event": "moved", "processes": [["server 0 (rank 1)", "node1", "node2"]]}
    told = "note: moved to a node that is left: server 0 (rank 1) from node1 to node2"
    assert in_words(event) == [told]

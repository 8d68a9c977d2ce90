"""Who each process is, in the words of every framework: golden values, and what cannot be."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import RequestError
from allranks.launcher.scripts.topology import (
    DEFAULT_FAMILIES,
    FAMILIES,
    Host,
    Topology,
    defaults_for,
    parse_families,
    parse_roles,
    step_variables,
    variables_for,
)

TWO_NODES = (
    Host("n1", "10.0.0.1", "eth0", 2, (29501, 29502, 29503)),
    Host("n2", "10.0.0.2", "ib0", 2, (29601, 29602, 29603)),
)
ONE = (Host("here", "127.0.0.1", "lo", 1, (40000, 40001)),)


def made(
    rank: int, *families: str, hosts: tuple[Host, ...] = TWO_NODES, roles: str = ""
) -> dict[str, str]:
    topology = Topology(hosts, parse_roles(roles))
    chosen = families or DEFAULT_FAMILIES
    return variables_for(
        topology, rank, run_id="job7", restart_count=1, max_restarts=3, families=chosen
    )


def test_torch() -> None:
    assert made(3, "torch") == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29501",
        "TORCHELASTIC_RUN_ID": "job7",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def test_a_role_is_counted_by_itself() -> None:
    values = made(3, "torch", roles="chief=1,worker=2,ps=1")
    assert [values[name] for name in ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "RANK")] == [
        "ps",
        "0",
        "1",
        "3",
    ]


def test_tf_config_of_workers() -> None:
    assert json.loads(made(2, "tensorflow")["TF_CONFIG"]) == {
        "cluster": {
            "worker": ["10.0.0.1:29502", "10.0.0.1:29503", "10.0.0.2:29602", "10.0.0.2:29603"]
        },
        "task": {"type": "worker", "index": 2},
    }


def test_tf_config_of_all_roles_is_the_same_but_for_the_task() -> None:
    roles = "chief=1,worker=1,ps=1,evaluator=1"
    configs = [json.loads(made(rank, "tensorflow", roles=roles)["TF_CONFIG"]) for rank in range(4)]
    assert [config.pop("task") for config in configs] == [
        {"type": "chief", "index": 0},
        {"type": "worker", "index": 0},
        {"type": "ps", "index": 0},
        {"type": "evaluator", "index": 0},
    ]
    assert configs == 4 * [
        {
            "cluster": {
                "chief": ["10.0.0.1:29502"],
                "worker": ["10.0.0.1:29503"],
                "ps": ["10.0.0.2:29602"],
            }
        }
    ]


def test_a_process_alone_gets_no_cluster() -> None:
    """MirroredStrategy would take a cluster of one for devices of other machines."""
    values = made(0, hosts=ONE)
    assert "TF_CONFIG" not in values and values["WORLD_SIZE"] == "1"
    assert "JAX_LOCAL_DEVICE_IDS" not in values


def test_jax() -> None:
    values = made(1, "jax")
    assert {name: value for name, value in values.items() if name.startswith("JAX")} == {
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:29501",
        "JAX_COORDINATOR_BIND_ADDRESS": "10.0.0.1:29501",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "1",
        "JAX_LOCAL_DEVICE_IDS": "1",
    }
    assert values["OMPI_COMM_WORLD_SIZE"] == "4" and values["OMPI_COMM_WORLD_RANK"] == "1"
    assert values["OMPI_MCA_orte_hnp_uri"]


def test_mpi_style() -> None:
    assert made(3, "mpi") == {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_NODE_RANK": "1",
        "OMPI_UNIVERSE_SIZE": "4",
    }


def test_what_a_process_manager_would_answer_for_is_set_on_request_only() -> None:
    assert not [name for name in made(0) if name.startswith("PMI")]
    assert made(3, "pmi", "pmix") == {
        "PMI_RANK": "3",
        "PMI_SIZE": "4",
        "PMIX_RANK": "3",
        "PMIX_NAMESPACE": "job7",
    }


def test_deepspeed() -> None:
    assert made(2, "deepspeed") == {"LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}


def test_dmlc() -> None:
    roles = "worker=2,scheduler=1,server=1"
    common = {
        "DMLC_PS_ROOT_URI": "10.0.0.2",
        "DMLC_PS_ROOT_PORT": "29601",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
    }
    assert made(1, "dmlc", roles=roles) == {
        **common,
        "DMLC_ROLE": "worker",
        "DMLC_TASK_ID": "1",
        "DMLC_NODE_HOST": "10.0.0.1",
    }
    assert made(2, "dmlc", roles=roles) == {
        **common,
        "DMLC_ROLE": "scheduler",
        "DMLC_TASK_ID": "0",
        "DMLC_NODE_HOST": "10.0.0.2",
    }
    assert "TF_CONFIG" not in made(0, roles=roles)
    assert made(0, "dmlc") == {}


def test_what_the_user_has_set_stays() -> None:
    topology = Topology(TWO_NODES)
    values = defaults_for(topology, 2, {"OMP_NUM_THREADS": "8", "NCCL_SOCKET_IFNAME": "mlx5"})
    assert "OMP_NUM_THREADS" not in values and "NCCL_SOCKET_IFNAME" not in values
    assert values["GLOO_SOCKET_IFNAME"] == values["TP_SOCKET_IFNAME"] == "ib0"
    assert defaults_for(topology, 0, {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in defaults_for(Topology(ONE), 0, {})


def test_an_ipv6_address_stands_in_brackets() -> None:
    host = Host("n1", "fd00::1", "eth0", 2, (29501, 29502, 29503))
    values = made(0, hosts=(host,))
    assert values["MASTER_ADDR"] == "fd00::1"
    assert values["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:29501"
    assert json.loads(values["TF_CONFIG"])["cluster"]["worker"][1] == "[fd00::1]:29503"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_ranks_count_through_the_hosts(processes: list[int]) -> None:
    hosts = tuple(
        Host(f"n{i}", f"10.0.0.{i}", "", count, tuple(range(3000, 3001 + count)))
        for i, count in enumerate(processes)
    )
    topology = Topology(hosts)
    members = topology.members
    assert [member.rank for member in members] == list(range(topology.world_size))
    assert [(m.node, m.local_rank) for m in members] == [
        (node, local) for node, count in enumerate(processes) for local in range(count)
    ]
    assert len({member.endpoint for member in members}) == topology.world_size


@pytest.mark.parametrize(
    ("roles", "found"),
    [
        ("chief=1,master=3", "the role 'master'"),
        ("chief=2,worker=2", "chief=2"),
        ("worker=2,worker=2", "worker=2, twice"),
        ("worker=0,ps=4", "worker=0"),
        ("worker=3", "4 processes in the job"),
        ("server=1,worker=3", "no scheduler"),
        ("scheduler=1,server=1,chief=1,worker=1", "roles of TensorFlow and of DMLC programs"),
        ("worker", "'worker'"),
        ("worker=-1", "'worker=-1'"),
    ],
)
def test_roles_that_cannot_be(roles: str, found: str) -> None:
    with pytest.raises(RequestError) as raised:
        Topology(TWO_NODES, parse_roles(roles))
    assert raised.value.found == found


def test_two_nodes_with_one_address_are_refused() -> None:
    with pytest.raises(RequestError, match=r"10\.0\.0\.1:29501 twice"):
        Topology((TWO_NODES[0], TWO_NODES[0]))
    on_one_machine = Host("n2", "10.0.0.1", "eth0", 1, (29701, 29702))
    assert Topology((TWO_NODES[0], on_one_machine)).world_size == 3


@pytest.mark.parametrize("hosts", [(), (Host("n1", "a", "", 0, (1,)),)])
def test_a_job_has_processes(hosts: tuple[Host, ...]) -> None:
    with pytest.raises(RequestError, match="at least one process"):
        Topology(hosts)


def test_a_host_needs_a_port_for_each_process() -> None:
    with pytest.raises(RequestError, match="reserve 3 ports"):
        Topology((Host("n1", "a", "", 2, (1, 2)),))


def test_families_are_chosen_by_name() -> None:
    assert parse_families("jax, torch") == ("torch", "jax")
    assert parse_families("all") == FAMILIES
    with pytest.raises(RequestError, match="did you mean 'torch'"):
        parse_families("troch")


def test_what_slurm_would_say_to_each_process() -> None:
    hosts = (Host("a", "10.0.0.1", "eth0", 2, (1, 2, 3)), Host("b", "10.0.0.2", "eth0", 1, (1, 2)))
    said = step_variables(Topology(hosts), 2)
    assert (said["SLURM_PROCID"], said["SLURM_LOCALID"], said["SLURM_NODEID"]) == ("2", "0", "1")
    assert said["SLURM_NTASKS"] == "3" and said["SLURM_STEP_TASKS_PER_NODE"] == "2,1"

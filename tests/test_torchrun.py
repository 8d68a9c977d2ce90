"""torchrun's flags: each is honoured, noted or refused, and none of torch's own is unknown."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from allranks.errors import RequestError
from allranks.launcher.scripts.torchrun import FLAGS, TorchrunFlags, processes_from, understand


def test_every_flag_of_the_installed_torchrun_is_known() -> None:
    theirs = {
        word: bool(action.nargs != 0)
        for action in get_args_parser()._actions
        for word in action.option_strings
        if action.dest != "help"
    }
    ours = {word: not flag.kind.is_switch for flag in FLAGS for word in flag.spellings}
    assert theirs.items() <= ours.items()


def asked(**given: Any) -> TorchrunFlags:
    return understand(given, {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, TorchrunFlags()),
        ({"nproc_per_node": "4"}, TorchrunFlags(processes_per_node="4")),
        ({"nproc_per_node": "gpu"}, TorchrunFlags(processes_per_node="gpu")),
        ({"nnodes": "2"}, TorchrunFlags(least_nodes=2, most_nodes=2)),
        ({"nnodes": "1:4"}, TorchrunFlags(least_nodes=1, most_nodes=4)),
        ({"nnodes": "4", "standalone": True}, TorchrunFlags(least_nodes=1, most_nodes=1)),
        ({"node_rank": "1", "rdzv_id": "job7"}, TorchrunFlags(node_rank=1, run_id="job7")),
        ({"rdzv_endpoint": "n1:29400"}, TorchrunFlags(endpoint="n1:29400")),
        ({"rdzv_id": "none", "max_restarts": "3"}, TorchrunFlags(max_restarts=3)),
        ({"rdzv_conf": "join_timeout=60"}, TorchrunFlags(join_timeout_s=60.0)),
        ({"role": "trainer", "module": True}, TorchrunFlags(role_name="trainer", is_module=True)),
        ({"no_python": True}, TorchrunFlags(is_program=True)),
        (
            {"master_addr": "[::1]", "master_port": "29500"},
            TorchrunFlags(master_addr="::1", master_port=29500),
        ),
        ({"shutdown_timeout": "5"}, TorchrunFlags(grace_s=5.0)),
        ({"event_log_handler": "null", "logs_specs": "default"}, TorchrunFlags()),
    ],
)
def test_what_is_honoured(given: dict[str, Any], expected: TorchrunFlags) -> None:
    assert understand(given, {}) == expected


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, ""),
        ({"tee": "3"}, "all"),
        ({"tee": "0:3,1:3"}, "0,1"),
        ({"redirects": "3"}, "none"),
        ({"redirects": "0:3"}, "none"),
        ({"redirects": "1:3"}, "0"),
        ({"local_ranks_filter": "0,2"}, "0,2"),
        ({"local_ranks_filter": "0,2", "redirects": "2:3"}, "0"),
        ({"tee": "3", "local_ranks_filter": "1"}, "1"),
        ({"tee": "0", "redirects": "0"}, ""),
    ],
)
def test_whose_output_is_shown(given: dict[str, Any], shown: str) -> None:
    assert understand(given, {}).shown == shown


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"monitor_interval": "5"}, "--monitor-interval: an exit is seen at once"),
        ({"start_method": "fork"}, "--start-method: "),
        ({"rdzv_backend": "c10d"}, "--rdzv-backend: "),
        ({"signals_to_handle": "SIGTERM"}, "--signals-to-handle: "),
        ({"log_dir": "logs"}, "--log-dir: the run folder is made in it"),
        ({"run_path": True}, "--run-path: "),
        ({"local_addr": "::1"}, "--local-addr: the address of a node is found; --interface"),
        ({"rdzv_conf": "timeout=9,read_timeout=60"}, "--rdzv-conf: read_timeout"),
        ({"redirects": "1"}, "--redirects: both streams"),
        ({"tee": "0:2"}, "--tee: both streams"),
    ],
)
def test_what_is_accepted_is_told(given: dict[str, Any], word: str) -> None:
    (note,) = understand(given, {}).notes
    assert note.startswith(word)


@pytest.mark.parametrize(
    ("given", "do"),
    [
        ({"rdzv_backend": "etcd-v2"}, "--rdzv-backend c10d"),
        ({"numa_binding": "node"}, "numactl"),
        ({"virtual_local_rank": True}, "CUDA_VISIBLE_DEVICES=$LOCAL_RANK"),
        ({"logs_specs": "mine"}, "logs/rank-000.log"),
        ({"event_log_handler": "console"}, "events.jsonl"),
        ({"duplicate_stdout_filters": "loss"}, "grep"),
        ({"duplicate_stderr_filters": "loss"}, "grep"),
        ({"module": True, "no_python": True}, "leave one away"),
        ({"nnodes": "0"}, "--nnodes"),
        ({"nnodes": "4:2"}, "--nnodes"),
        ({"nnodes": "two"}, "--nnodes"),
        ({"nproc_per_node": "0"}, "--nproc-per-node"),
        ({"nproc_per_node": "xpu"}, "--nproc-per-node"),
        ({"max_restarts": "-1"}, "--max-restarts"),
        ({"node_rank": "1.5"}, "--node-rank"),
        ({"master_port": "70000"}, "--master-port"),
        ({"shutdown_timeout": "nan"}, "--shutdown-timeout"),
        ({"rdzv_conf": "timeout=soon"}, "--rdzv-conf"),
        ({"tee": "0:7"}, "--tee"),
        ({"local_ranks_filter": "a"}, "--local-ranks-filter"),
    ],
)
def test_what_is_refused_says_what_to_use(given: dict[str, Any], do: str) -> None:
    with pytest.raises(RequestError) as raised:
        understand(given, {})
    assert do in raised.value.do


def test_an_operator_of_a_cluster_sets_the_same_flags_by_variables() -> None:
    environment = {
        "PET_NPROC_PER_NODE": "8",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "n1",
        "PET_STANDALONE": "0",
    }
    expected = TorchrunFlags(
        processes_per_node="4", least_nodes=2, most_nodes=2, node_rank=1, master_addr="n1"
    )
    assert understand({"nproc_per_node": "4"}, environment) == expected
    assert understand({}, {"PET_STANDALONE": "1"}).most_nodes == 1


def test_how_many_processes() -> None:
    assert processes_from("3", cpus=16, gpus=4) == 3
    assert processes_from("cpu", cpus=16, gpus=4) == 16
    assert processes_from("auto", cpus=16, gpus=4) == processes_from("gpu", cpus=16, gpus=4) == 4
    assert processes_from("auto", cpus=16, gpus=0) == 16
    with pytest.raises(RequestError, match="no GPU"):
        processes_from("gpu", cpus=16, gpus=0)

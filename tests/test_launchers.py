"""Environments of real launchers, as they were recorded, and the world that follows from each."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from allranks.errors import RequestError
from allranks.launcher.slurm.allocation import first_port
from allranks.launcher.world import (
    World,
    launched_by,
    missing_master_address,
    standard_variables,
)


@dataclass(frozen=True)
class Recorded:
    """What a process saw, as `env` printed it; and who it is: rank, size, local ones, node."""

    name: str
    text: str
    world: tuple[int, int, int, int, int]

    @property
    def variables(self) -> dict[str, str]:
        pairs = (line.strip().split("=", 1) for line in self.text.strip().splitlines())
        return {name: value for name, value in pairs}


ALONE = (0, 1, 0, 1, 0)
RECORDED = [
    Recorded("nothing", "HOME=/root", ALONE),
    Recorded(
        "Slurm 20.11, srun --nodes=2 --ntasks=4, third task",
        """SLURM_JOBID=1234567
        SLURM_JOB_ID=1234567
        SLURM_JOB_NODELIST=r01g[01-02]
        SLURM_JOB_NUM_NODES=2
        SLURM_LOCALID=0
        SLURM_NNODES=2
        SLURM_NODEID=1
        SLURM_NODELIST=r01g[01-02]
        SLURM_NPROCS=4
        SLURM_NTASKS=4
        SLURM_PROCID=2
        SLURM_STEPID=0
        SLURM_STEP_ID=0
        SLURM_STEP_NODELIST=r01g[01-02]
        SLURM_STEP_NUM_NODES=2
        SLURM_STEP_NUM_TASKS=4
        SLURM_STEP_TASKS_PER_NODE=2(x2)
        SLURM_TASKS_PER_NODE=2(x2)""",
        (2, 4, 0, 2, 1),
    ),
    Recorded(
        "Slurm 23.02, srun --ntasks=1 --pty",
        """SLURM_CPUS_PER_TASK=4
        SLURM_JOB_CPUS_PER_NODE=4
        SLURM_JOB_END_TIME=1777355287
        SLURM_JOB_ID=22902023
        SLURM_JOB_NODELIST=sh04-10n05
        SLURM_JOB_NUM_NODES=1
        SLURM_LOCALID=0
        SLURM_MPI_TYPE=pmix
        SLURM_NNODES=1
        SLURM_NODEID=0
        SLURM_NODELIST=sh04-10n05
        SLURM_NPROCS=1
        SLURM_NTASKS=1
        SLURM_PMIX_MAPPING_SERV=(vector,(0,1,1))
        SLURM_PROCID=0
        SLURM_STEPID=0
        SLURM_STEP_GPUS=7
        SLURM_STEP_ID=0
        SLURM_STEP_NODELIST=sh04-10n05
        SLURM_STEP_NUM_NODES=1
        SLURM_STEP_NUM_TASKS=1
        SLURM_STEP_TASKS_PER_NODE=1
        SLURM_TASKS_PER_NODE=1
        SLURM_TRES_PER_TASK=cpu=4
        SRUN_CPUS_PER_TASK=4""",
        ALONE,
    ),
    Recorded(
        "Slurm 22.05, salloc on 8 CPUs, the shell of its interactive step",
        """SLURM_CPUS_ON_NODE=8
        SLURM_GPUS_ON_NODE=1
        SLURM_JOB_CPUS_PER_NODE=8
        SLURM_JOB_ID=1720714
        SLURM_JOB_NODELIST=GPU71E4
        SLURM_LOCALID=0
        SLURM_NNODES=1
        SLURM_NODEID=0
        SLURM_PROCID=0
        SLURM_STEPID=4294967290
        SLURM_STEP_ID=4294967290
        SLURM_STEP_NODELIST=GPU71E4
        SLURM_STEP_NUM_TASKS=1
        SLURM_STEP_TASKS_PER_NODE=1
        SLURM_TASKS_PER_NODE=8""",
        ALONE,
    ),
    Recorded(
        "Slurm 22.05, sbatch --nodes=2 --ntasks-per-node=4, the script itself",
        """SLURM_JOB_ID=501
        SLURM_JOB_NODELIST=n[1-2]
        SLURM_LOCALID=0
        SLURM_NNODES=2
        SLURM_NODEID=0
        SLURM_NPROCS=8
        SLURM_NTASKS=8
        SLURM_NTASKS_PER_NODE=4
        SLURM_PROCID=0
        SLURM_TASKS_PER_NODE=4(x2)""",
        ALONE,
    ),
    Recorded(
        "Slurm 20.02, sbatch --ntasks=3 on two nodes, srun in it, last task",
        """SLURM_JOB_ID=77
        SLURM_JOB_NODELIST=c[1-2]
        SLURM_LOCALID=0
        SLURM_NODEID=1
        SLURM_NTASKS=3
        SLURM_NPROCS=3
        SLURM_PROCID=2
        SLURM_STEP_ID=1
        SLURM_STEP_NODELIST=c[1-2]
        SLURM_STEP_NUM_TASKS=3
        SLURM_STEP_TASKS_PER_NODE=2,1
        SLURM_TASKS_PER_NODE=2,1""",
        (2, 3, 0, 1, 1),
    ),
    Recorded(
        "Slurm 24.05, a step on 4 of the 7 tasks of its job, uneven counts",
        """SLURM_JOB_ID=90001
        SLURM_JOB_NODELIST=a[01-03],b7
        SLURM_LOCALID=1
        SLURM_NODEID=1
        SLURM_NTASKS=4
        SLURM_PROCID=3
        SLURM_STEP_ID=12
        SLURM_STEP_NODELIST=a02,b7
        SLURM_STEP_NUM_TASKS=4
        SLURM_STEP_TASKS_PER_NODE=2(x2)
        SLURM_TASKS_PER_NODE=2(x3),1""",
        (3, 4, 1, 2, 1),
    ),
    Recorded(
        "Slurm 23.11, srun --distribution=cyclic: ranks go round the nodes",
        """SLURM_JOB_ID=8
        SLURM_JOB_NODELIST=n[1-2]
        SLURM_LOCALID=1
        SLURM_NODEID=1
        SLURM_PROCID=3
        SLURM_STEP_ID=0
        SLURM_STEP_NODELIST=n[1-2]
        SLURM_STEP_NUM_TASKS=4
        SLURM_STEP_TASKS_PER_NODE=2(x2)""",
        (3, 4, 1, 2, 1),
    ),
    Recorded(
        "Slurm 22.05, srun --mpi=pmix",
        """PMIX_NAMESPACE=slurm.pmix.90.0
        PMIX_RANK=1
        PMIX_SERVER_URI2=pmix-server.90.0;tcp4://127.0.0.1:33333
        SLURM_JOB_ID=90
        SLURM_JOB_NODELIST=n1
        SLURM_LOCALID=1
        SLURM_NODEID=0
        SLURM_PROCID=1
        SLURM_STEP_ID=0
        SLURM_STEP_NODELIST=n1
        SLURM_STEP_NUM_TASKS=2
        SLURM_STEP_TASKS_PER_NODE=2""",
        (1, 2, 1, 2, 0),
    ),
    Recorded(
        "Slurm 21.08, srun --mpi=pmi2, which says nothing of the node",
        """PMI_FD=13
        PMI_JOBID=90.0
        PMI_RANK=3
        PMI_SIZE=4
        SLURM_JOB_ID=90
        SLURM_JOB_NODELIST=n[1-2]
        SLURM_LOCALID=1
        SLURM_NODEID=1
        SLURM_PROCID=3
        SLURM_STEP_ID=0
        SLURM_STEP_NODELIST=n[1-2]
        SLURM_STEP_NUM_TASKS=4
        SLURM_STEP_TASKS_PER_NODE=2(x2)""",
        (3, 4, 1, 2, 1),
    ),
    Recorded(
        "Open MPI 4.1, mpirun -np 4 on one machine",
        """OMPI_COMM_WORLD_LOCAL_RANK=2
        OMPI_COMM_WORLD_LOCAL_SIZE=4
        OMPI_COMM_WORLD_NODE_RANK=2
        OMPI_COMM_WORLD_RANK=2
        OMPI_COMM_WORLD_SIZE=4
        OMPI_MCA_orte_ess_node_rank=2
        OMPI_UNIVERSE_SIZE=4
        PMIX_RANK=2""",
        (2, 4, 2, 4, 0),
    ),
    Recorded(
        "Open MPI 4.1, --map-by ppr:3:node on two machines: the node is not said",
        """OMPI_COMM_WORLD_LOCAL_RANK=1
        OMPI_COMM_WORLD_LOCAL_SIZE=2
        OMPI_COMM_WORLD_NODE_RANK=1
        OMPI_COMM_WORLD_RANK=4
        OMPI_COMM_WORLD_SIZE=5
        OMPI_FIRST_RANKS=0
        OMPI_MCA_orte_ess_node_rank=1
        PMIX_RANK=4""",
        (4, 5, 1, 2, -1),
    ),
    Recorded(
        "Open MPI 5.0 inside of a job of Slurm: the step is that of its daemon",
        """OMPI_COMM_WORLD_LOCAL_RANK=1
        OMPI_COMM_WORLD_LOCAL_SIZE=2
        OMPI_COMM_WORLD_NODE_RANK=1
        OMPI_COMM_WORLD_RANK=3
        OMPI_COMM_WORLD_SIZE=4
        PMIX_NAMESPACE=prterun-n1-2345@1
        PMIX_RANK=3
        PRTE_LAUNCHED=1
        SLURM_JOB_ID=64
        SLURM_JOB_NODELIST=n[1-2]
        SLURM_LOCALID=0
        SLURM_NODEID=0
        SLURM_PROCID=0
        SLURM_STEP_ID=0
        SLURM_STEP_NODELIST=n2
        SLURM_STEP_NUM_TASKS=1
        SLURM_STEP_TASKS_PER_NODE=1""",
        (3, 4, 1, 2, -1),
    ),
    Recorded(
        "MPICH 4.1, mpiexec.hydra -n 2",
        """GFORTRAN_UNBUFFERED_PRECONNECTED=y
        MPI_LOCALNRANKS=2
        MPI_LOCALRANKID=1
        PMI_FD=9
        PMI_RANK=1
        PMI_SIZE=2""",
        (1, 2, 1, 2, 0),
    ),
    Recorded(
        "Intel MPI 2021, -np 5 -ppn 3 on two machines",
        """I_MPI_MPIRUN=mpirun
        MPI_LOCALNRANKS=2
        MPI_LOCALRANKID=1
        PMI_FD=9
        PMI_RANK=4
        PMI_SIZE=5""",
        (4, 5, 1, 2, -1),
    ),
    Recorded(
        "Cray PALS, mpiexec",
        """PALS_LOCAL_RANKID=3
        PALS_LOCAL_SIZE=6
        PALS_RANKID=9
        PMI_RANK=9
        PMI_SIZE=12""",
        (9, 12, 3, 6, -1),
    ),
    Recorded(
        "MVAPICH2 2.3, mpirun_rsh -np 4",
        """MV2_COMM_WORLD_LOCAL_RANK=0
        MV2_COMM_WORLD_LOCAL_SIZE=2
        MV2_COMM_WORLD_RANK=2
        MV2_COMM_WORLD_SIZE=4
        PMI_ID=2
        PMI_PORT=n1:41234""",
        (2, 4, 0, 2, -1),
    ),
    Recorded(
        "torchrun in a step of srun: its words win",
        """GROUP_RANK=1
        LOCAL_RANK=3
        LOCAL_WORLD_SIZE=4
        MASTER_ADDR=n1
        MASTER_PORT=29500
        RANK=7
        WORLD_SIZE=8
        SLURM_JOB_ID=64
        SLURM_JOB_NODELIST=n[1-2]
        SLURM_LOCALID=0
        SLURM_NODEID=1
        SLURM_PROCID=1
        SLURM_STEP_ID=0
        SLURM_STEP_NODELIST=n[1-2]
        SLURM_STEP_NUM_TASKS=2
        SLURM_STEP_TASKS_PER_NODE=1(x2)""",
        (7, 8, 3, 4, 1),
    ),
    Recorded(
        "a script that exports WORLD_SIZE for its srun, and no RANK",
        """MASTER_ADDR=n1
        MASTER_PORT=12355
        WORLD_SIZE=2
        SLURM_JOB_ID=64
        SLURM_JOB_NODELIST=n[1-2]
        SLURM_LOCALID=0
        SLURM_NODEID=1
        SLURM_PROCID=1
        SLURM_STEP_ID=0
        SLURM_STEP_NODELIST=n[1-2]
        SLURM_STEP_NUM_TASKS=2
        SLURM_STEP_TASKS_PER_NODE=1(x2)""",
        (1, 2, 0, 1, 1),
    ),
]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.name)
def test_the_world_of_a_recorded_environment(recorded: Recorded) -> None:
    world = World.from_environment(recorded.variables)
    found = (world.rank, world.size, world.local_rank, world.local_size, world.node)
    assert found == recorded.world


def variables(name: str) -> dict[str, str]:
    return next(r.variables for r in RECORDED if r.name.startswith(name))


def test_broken_variables_of_slurm_do_not_matter_where_rank_is_set() -> None:
    broken = variables("torchrun") | {"SLURM_STEP_NODELIST": "n[", "SLURM_PROCID": "x"}
    assert World.from_environment(broken).rank == 7
    assert standard_variables(broken) == {}


def test_a_process_outside_of_a_step_does_not_ask_what_slurm_says() -> None:
    assert World.from_environment({"SLURM_JOB_ID": "1"}) == World()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not set, and its companion is"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set, and its companion is"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, "PMI_RANK='x'"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "by MPICH or Intel MPI; on this node None of None"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "2"}, "on this node 2 of 2"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}, "on this node 0 of 3"),
        ({"PMIX_RANK": "1"}, "no variable that says how many there are"),
        (variables("a script that exports") | {"WORLD_SIZE": "8"}, "srun started 2 processes, this is 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(given: dict[str, str], found: str) -> None:
    with pytest.raises(RequestError) as refused:
        World.from_environment(given)
    assert found in refused.value.found
    assert all(refused.value.to_data().values())


def test_the_meeting_point_is_the_first_node_of_the_step() -> None:
    step = variables("Slurm 24.05")
    port = str(first_port(90001, 12))
    assert missing_master_address(step) == {"MASTER_ADDR": "a02", "MASTER_PORT": port}
    assert missing_master_address(step | {"MASTER_ADDR": "x"}) == {"MASTER_PORT": port}
    assert missing_master_address(variables("torchrun")) == {}
    assert missing_master_address(variables("Slurm 22.05, sbatch")) == {}
    assert missing_master_address({}) == {}


def test_all_tasks_of_a_step_meet_at_one_point_and_other_steps_elsewhere() -> None:
    step = variables("Slurm 20.11")
    first = step | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    assert missing_master_address(first) == missing_master_address(step)
    assert missing_master_address(first | {"SLURM_STEP_ID": "1"}) != missing_master_address(step)


def test_the_launcher_is_named() -> None:
    names = {r.name.split(",")[0]: launched_by(r.variables) for r in RECORDED}
    assert {found.launcher for found in names.values() if found} == {
        "srun",
        "Open MPI",
        "MPICH or Intel MPI",
        "MVAPICH",
    }

"""What Slurm answered on real machines, in the form of each version; shortened, names changed."""

from __future__ import annotations

CONFIG = """Configuration data as of 2024-08-19T19:08:02
AccountingStorageBackupHost = (null)
AccountingStorageEnforce = associations,limits,qos,safe
AccountingStorageHost   = 10.59.51.10
AccountingStorageTRES   = cpu,mem,energy,node,billing,fs/disk,vmem,pages
ClusterName             = borealis
MaxJobCount             = 10000
SLURM_CONF              = /etc/slurm/slurm.conf
SLURM_VERSION           = 23.11.0
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SlurmctldPort           = 6817

Slurmctld(primary) at ctl1 is UP
"""
PARTITIONS = "\n".join(
    [
        "PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES "
        "QoS=N/A DefaultTime=01:00:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO "
        "MaxNodes=UNLIMITED MaxTime=3-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED "
        "MaxCPUsPerSocket=UNLIMITED NodeSets=cpus Nodes=c[1-3] PriorityJobFactor=1 PriorityTier=1 "
        "RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP "
        "TotalCPUs=144 TotalNodes=3 SelectTypeParameters=NONE JobDefaults=(null) "
        "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=144,mem=375G,node=3,billing=144",
        "PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO "
        "QoS=juno DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO "
        "MaxNodes=2 MaxTime=2-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=40 Nodes=g-04-[02-03],g-05-01 "
        "OverSubscribe=NO State=UP TotalCPUs=192 TotalNodes=3 DefMemPerCPU=2000 MaxMemPerNode=180000 "
        "TRES=cpu=192,mem=1500G,node=3,billing=192,gres/gpu=10",
        "PartitionName=whole Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=2 Nodes=c[1-2] "
        "OverSubscribe=EXCLUSIVE State=UP TotalCPUs=96 TotalNodes=2",
        "PartitionName=empty Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=1 Nodes=(null) "
        "OverSubscribe=NO State=UP TotalCPUs=0 TotalNodes=0",
    ]
)
C_NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=12  CPUAlloc=0 CPUEfctv={cpus} CPUTot=48 CPULoad=0.01 "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres=(null) NodeAddr={name} NodeHostName={name} "
    "Version=23.11.0 OS=Linux 6.2.0-37-generic #38~22.04.1-Ubuntu SMP PREEMPT_DYNAMIC Thu Nov  2 "
    "18:01:13 UTC 2  RealMemory=128000 AllocMem=0 FreeMem=97029 Sockets=2 Boards=1 CoreSpecCount=1 "
    "MemSpecLimit=4000 State={state} ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
    "Partitions=cpu,whole  BootTime=2023-12-07T21:50:56 CfgTRES=cpu=48,mem=125G,billing=48 AllocTRES= "
    "CapWatts=n/a Reason=Not responding [slurm@2024-01-01T00:00:00]"
)
G_NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=32 CPUAlloc=12 CPUTot=64 CPULoad=1.0 Gres={gres} "
    "NodeAddr={name} OS=Linux 4.18.0-372.19.1.el8_6.x86_64 #1 SMP Tue Aug 2 16:19:42 UTC 2022 "
    "RealMemory=512000 AllocMem=0 State=MIXED ThreadsPerCore=1 Partitions=gpu CfgTRES=cpu=64,mem=500G"
)
NODES = "\n".join(
    [
        C_NODE.format(name="c1", cpus=46, state="IDLE"),
        C_NODE.format(name="c2", cpus=46, state="MIXED+DRAIN"),
        C_NODE.format(name="c3", cpus=46, state="DOWN*"),
        G_NODE.format(name="g-04-02", gres="gpu:h100:4(S:0-1),nvme:3600"),
        G_NODE.format(name="g-04-03", gres="gpu:h100:2(S:0)"),
        G_NODE.format(name="g-05-01", gres="gpu:h100:4(S:0-1)"),
    ]
)
JOB = (
    "JobId={job} JobName=my job=x UserId=me(1000) GroupId=me(1000) MCS_label=N/A Priority=1095 Nice=0 "
    "Account=arc QOS=normal JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code} RunTime=00:00:04 TimeLimit=00:30:00 "
    "SubmitTime=2025-10-08T16:04:49 EndTime={end} Deadline=N/A Partition=debug NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=4 "
    "TRES=cpu=4,mem=4000M,node=2,billing=4 Command=/w/my job.sbatch WorkDir=/w StdOut=/w/out"
)


def job_line(**values: object) -> str:
    """A line of `scontrol --oneliner show job`: a job's name may hold blanks and `=`."""
    return JOB.format(**{"end": "2025-10-08T16:34:55", **values})

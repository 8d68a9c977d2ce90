"""One request for each bundled site, as a user would make it; the golden scripts are of these."""

from __future__ import annotations

from allranks.launcher.slurm.request import SlurmOptions, SlurmRequest, make_request
from allranks.launcher.slurm.site import load_site

TWO_HOURS_S = 7200
RUN_DIR = "/scratch/me/runs/digits-1"
GOLDEN = {
    "puhti": SlurmOptions(partition="gpu", account="project_2001234", nodes=2, time_s=TWO_HOURS_S),
    "mahti": SlurmOptions(
        partition="gpumedium", account="project_2001234", nodes=2, time_s=36 * 3600
    ),
    "lumi": SlurmOptions(
        partition="standard-g", account="project_462000001", nodes=4, time_s=2 * 86400
    ),
    "roihu": SlurmOptions(
        partition="gpumedium", account="project_2001234", ranks_per_node=2, nodes=2
    ),
    "taurus-ml": SlurmOptions(time_s=TWO_HOURS_S, requeue=True, survives_nodes=True),
    "taurus-gpu2": SlurmOptions(time_s=TWO_HOURS_S, gpus_per_node=2, requeue=True),
    "taurus-alpha": SlurmOptions(time_s=TWO_HOURS_S, container="/scratch/me/torch image.sif"),
    "template": SlurmOptions(
        partition="cpu", account="mine", nodes=3, ranks_per_node=4, mem_per_cpu=2000
    ),
}


def golden_request(name: str) -> SlurmRequest:
    """The request whose script is `golden/NAME.sbatch`."""
    asked = GOLDEN[name]
    site = load_site(name)
    venv = "" if asked.container else "/projappl/me/venv"
    given = {**vars(asked), "name": "digits", "venv": venv, "modules": site.modules}
    full = SlurmOptions(**given)
    device = "cuda" if name != "template" else "cpu"
    planned = make_request(site, full, command=(), folder="/scratch/me", run_dir=RUN_DIR)
    command = ["allranks", "train", "digits", "--device", device, "--set", "note=it's 100 %"]
    command += ["--place", "slurm", "--nodes", str(planned.nodes), "--ranks", str(planned.ranks)]
    return make_request(
        site,
        full,
        command=(*command, "--run-dir", RUN_DIR),
        folder="/scratch/me",
        run_dir=RUN_DIR,
    )

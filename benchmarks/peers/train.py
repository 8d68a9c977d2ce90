"""Trains the task of a job with a peer of allranks, as `allranks bench --peers` starts it.

    allranks run --ranks 2 -- python benchmarks/peers/train.py hand JOB.json FOLDER

FOLDER gets the mean loss of each step, and the memory of each rank. Without FOLDER the task is only
checked: a task that asks for more than a peer does ends with a line that says so, and exit code 2.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from allranks.catalog import TENSORFLOW
from allranks.errors import RequestError
from allranks.job.job import Job


def main() -> None:
    """Check the task or train it, with the framework of the job alone."""
    peer, job_file, *folder = sys.argv[1:]
    job = Job.from_data(json.loads(Path(job_file).read_text()))
    name = "with_tensorflow" if job.engine == TENSORFLOW else "torch_loop"
    framework = importlib.import_module(name)
    try:
        if folder:
            framework.train(job, Path(folder[0]), peer)
        else:
            framework.PeerTask(job)
    except RequestError as error:
        print(f"{error.found}; {error.why}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

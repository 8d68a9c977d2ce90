"""A process that has imported all but this package, and forks a pytest for every line it is given.

    python tests/mutants/warm.py        a request in each line: {"tests": […], "output": path}

It answers with the process that it has started, and then with how that one ended. Importing torch
costs more than most tests do; what is planted in the package itself is imported after the fork.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, NoReturn

import numpy  # noqa: F401
import pytest
import safetensors.torch  # noqa: F401
import torch
from torch.optim import SGD

OPTIONS = ("-q", "-x", "-p", "no:cacheprovider")


def serve() -> None:
    for line in sys.stdin:
        assert not any(name.partition(".")[0] == "allranks" for name in sys.modules)
        pid = os.fork()
        if pid == 0:
            run(json.loads(line))
        print(json.dumps({"pid": pid}), flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"code": code}), flush=True)


def run(request: dict[str, Any]) -> NoReturn:
    """In the child: these tests, as `python -m pytest` in the folder of the copy would run them."""
    code: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        os.setsid()
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(fd, number)
        os.closerange(3, 64)
        sys.path[0] = os.getcwd()
        code = pytest.main([*OPTIONS, *request["tests"]])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    SGD([torch.zeros(1, requires_grad=True)], lr=0.0)  # the compiler of torch is imported here
    serve()

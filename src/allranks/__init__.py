"""allranks: one training program on any number of ranks, and proof that the result is the same.

Importing this package does nothing: it reads no environment, sets up no logging and loads no
framework. Tasks for torch start from `allranks.torch`; `allranks.launch(task, ranks=4)` trains
one from a script or a notebook, `allranks.check(task)` compares it with one process; both are
loaded when they are first asked for.
"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in ("check", "launch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    catalog = importlib.import_module("allranks.catalog")
    return catalog.load(catalog.FUNCTIONS[name])

"""Starting, watching and stopping the ranks of a job. Knows no framework.

The package can be called: `allranks.launch(task, ranks=4)` is what a script or a notebook writes. A
function of that name in `allranks` would be replaced by this package as soon as it is imported.
"""

import sys
from types import ModuleType
from typing import Any

from allranks.catalog import load


class _Callable(ModuleType):
    """This package, as a function."""

    def __call__(self, task: Any, **job: Any) -> Any:
        """See `allranks.from_python.launching.launch`."""
        return load("allranks.from_python.launching:launch")(task, **job)


sys.modules[__name__].__class__ = _Callable

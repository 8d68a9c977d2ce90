"""What stands on PYTHONPATH in a script that is changed, so that Python imports it first."""

from __future__ import annotations

import os
from collections.abc import Mapping


def path_with_hooks(given: Mapping[str, str]) -> str:
    """PYTHONPATH with which a Python finds the hooks of this folder, before all that was there.

    Each node calls this for itself: allranks may lie elsewhere there.
    """
    folders = [os.path.dirname(__file__), given.get("PYTHONPATH", "")]
    return os.pathsep.join(folder for folder in folders if folder)

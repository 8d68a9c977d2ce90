"""A folder for PYTHONPATH with a `sitecustomize`, which Python imports before a script."""

from __future__ import annotations

import os
from collections.abc import Mapping


def path_with_hooks(environment: Mapping[str, str]) -> str:
    """PYTHONPATH with the hooks of this folder before all others.

    Each node calls this itself: allranks may be installed elsewhere there.
    """
    folders = [os.path.dirname(__file__), environment.get("PYTHONPATH", "")]
    return os.pathsep.join(folder for folder in folders if folder)

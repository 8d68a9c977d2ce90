"""What ranks do in the tests of places: they say what they see."""

from __future__ import annotations

import os
from pathlib import Path


def says_its_devices(path: str) -> int:
    Path(path).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    return 0

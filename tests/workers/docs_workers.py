"""What the tests of the documents run in processes of their own."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def run_script(path: str) -> None:
    """Run a script as `python PATH` does."""
    sys.argv = [path]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")

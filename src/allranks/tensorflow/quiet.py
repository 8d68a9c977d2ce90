"""What TensorFlow's C++ says to standard error while it begins: kept back, and told if it fails.

Its notes on instructions and on drivers that are not there cannot be turned off, and would stand
above every run. They are written past Python, so the file descriptor itself is turned aside. This
file imports no TensorFlow: `preload` needs it for that import.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2


@contextmanager
def quietly() -> Iterator[None]:
    """Within, nothing is written to standard error; what was, is written after all if it raises."""
    sys.stderr.flush()
    kept = os.dup(STDERR)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), STDERR)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            aside.seek(0)
            os.write(kept, aside.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, STDERR)
            os.close(kept)

"""Opening data files, packed with gzip (by the name `.gz`) or plain, with damage told by place."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import IO, cast

from allranks.errors import RequestError
from allranks.programs.readers.bad_record import BadRecord


class _Unpacked(gzip.GzipFile):
    """A packed file that says where it is damaged; places count what has been unpacked."""

    def read(self, size: int | None = -1) -> bytes:
        return cast(bytes, self._at(super().read, size))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return cast(int, self._at(super().seek, offset, whence))

    def _at(self, act: object, *arguments: int | None) -> object:
        try:
            return act(*arguments)  # type: ignore[operator]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            problem = f"it cannot be unpacked further: {error}"
            raise BadRecord(str(self.name), f"unpacked byte {self.tell()}", problem) from error


def opened(path: str | Path) -> IO[bytes]:
    """The file, to be read from its start; what is packed is unpacked on the way."""
    if str(path).endswith((".gz", ".tgz")):
        return cast(IO[bytes], _Unpacked(path))
    return open(path, "rb")


def require(asked: str, files: list[Path], do: str) -> None:
    """Raise `RequestError` that names the files that are not there, if any."""
    missing = [str(path) for path in files if not path.exists()]
    if missing:
        raise RequestError(
            asked=asked,
            found=f"no {', no '.join(missing[:8])}" + (" …" if len(missing) > 8 else ""),
            why="these files are read by the training, on every rank",
            do=do,
        )

"""CRC-32C (Castagnoli), the checksum of TFRecord: RFC 3720, appendix B.4; RFC 3385.

The package google-crc32c computes it, with the instruction that processors have for it.
"""

from __future__ import annotations

from collections.abc import Callable

from allranks.catalog import load
from allranks.errors import RequestError


def masked_crc32c(data: bytes) -> int:
    """The checksum as TFRecord stores it, so that a file of checksums has sound ones itself."""
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _of_the_package() -> Callable[[bytes], int]:
    """Its function; raises `RequestError` where the package is not installed."""
    try:
        found: Callable[[bytes], int] = load("google_crc32c:value")
    except ModuleNotFoundError:
        raise RequestError(
            asked="to read or write TFRecord files",
            found="no package google_crc32c in this Python",
            why="it computes the two checksums that each record has",
            do="pip install 'allranks[tfrecord]'",
        ) from None
    return found


crc32c = _of_the_package()
"""The checksum of the bytes, without a mask."""

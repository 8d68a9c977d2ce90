"""CRC-32C (Castagnoli), the checksum of TFRecord. RFC 3720, appendix B.4; RFC 3385.

Long messages go through NumPy: a checksum is linear over its bits, so that of a row of 64 bytes is
the XOR of what each byte alone adds at its place, which is looked up. The checksums of 16 rows are
64 bytes again, and are joined in the same way with another table, until one is left. Zeros before
a message add nothing, so it is padded in front.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

POLYNOMIAL = 0x82F63B78  # reflected
ROW = 64
CHECKSUMS = ROW // 4  # of 4 bytes, in a row
PLAIN = 128  # bytes up to which a loop over them is faster
BLOCK = 1024  # rows looked up at once: what that takes stays in the cache

Table = NDArray[np.uint32]
_ALL = 0xFFFFFFFF


def crc32c(data: bytes | memoryview) -> int:
    """The checksum of `data`, without a mask."""
    return _by_rows(data) if len(data) > PLAIN else _by_bytes(data)


def masked_crc32c(data: bytes | memoryview) -> int:
    """The checksum as TFRecord stores it, so that a file of checksums has sound ones itself."""
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & _ALL


def _by_bytes(data: bytes | memoryview) -> int:
    checksum, table = _ALL, _byte_list()
    for byte in data:
        checksum = table[(checksum ^ byte) & 255] ^ checksum >> 8
    return checksum ^ _ALL


def _by_rows(data: bytes | memoryview) -> int:
    pad = -len(data) % ROW
    content = np.zeros(pad + len(data), np.uint8)
    content[pad:] = np.frombuffer(data, np.uint8)
    content[pad : pad + 4] ^= 255  # the same as to start with all bits set
    level = 0
    while True:
        joined = _joined(content.reshape(-1, ROW), _table(level))
        if len(joined) == 1:
            return int(joined[0]) ^ _ALL
        checksums = np.zeros(len(joined) + -len(joined) % CHECKSUMS, "<u4")
        checksums[-len(joined) :] = joined
        content, level = checksums.view(np.uint8), level + 1


def _joined(rows: NDArray[np.uint8], table: Table) -> Table:
    """The checksum of each row, (rows, 64) -> (rows,)."""
    flat, starts = table.reshape(-1), np.arange(ROW) * 256
    blocks = (rows[first : first + BLOCK] + starts for first in range(0, len(rows), BLOCK))
    # no index is out of range, and "clip" does not look
    found = [np.bitwise_xor.reduce(flat.take(b, mode="clip"), axis=1) for b in blocks]
    return np.concatenate(found)


@functools.cache
def _byte_table() -> Table:
    """What a last byte adds, (256,)."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(POLYNOMIAL), table >> 1)
    return table


@functools.cache
def _byte_list() -> list[int]:
    return [int(entry) for entry in _byte_table()]


@functools.cache
def _table(level: int) -> Table:
    """What a byte adds at each place of a row of this level: (64, 256)."""
    if level == 0:
        places = [_byte_table()]
        for _ in range(ROW - 1):
            places.append(_after_a_zero(places[-1]))
        return np.stack(places[::-1])
    moved = _shift(level)
    places = [_bytes_of_a_checksum()]
    for _ in range(CHECKSUMS - 1):
        places.append(_moved_on(places[-1], moved))
    return np.concatenate(places[::-1])


@functools.cache
def _shift(level: int) -> Table:
    """Each byte of a checksum after as many zeros as a checksum of this level stands for: (4, 256)."""
    shifted = _bytes_of_a_checksum()
    if level == 1:
        for _ in range(ROW):
            shifted = _after_a_zero(shifted)
        return shifted
    for _ in range(CHECKSUMS):
        shifted = _moved_on(shifted, _shift(level - 1))
    return shifted


def _bytes_of_a_checksum() -> Table:
    """(4, 256): byte b at place p of a little-endian checksum is b << 8p."""
    return np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]


def _after_a_zero(checksums: Table) -> Table:
    moved: Table = _byte_table()[checksums & 255] ^ checksums >> 8
    return moved


def _moved_on(checksums: Table, moved: Table) -> Table:
    """All checksums after the zeros that `moved`, (4, 256), is for."""
    low, second, third, high = (checksums >> (8 * p) & 255 for p in range(4))
    joined: Table = moved[0][low] ^ moved[1][second] ^ moved[2][third] ^ moved[3][high]
    return joined

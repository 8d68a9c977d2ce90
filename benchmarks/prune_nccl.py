"""A copy of libnccl with the code of one architecture alone, small enough to be carried.

    python benchmarks/prune_nccl.py libnccl.so.2 nccl-90.so.xz --architecture 90

The kernels of a library lie in containers, an entry for each architecture. The bytes of the others
become zeros, which compress to nothing; the file keeps its length, and loads as before. NCCL 2.31
and later lets several ranks share a device. `gpu_session.py --nccl FILE` loads the copy before
torch's own.
"""

from __future__ import annotations

import argparse
import lzma
import struct
import sys
from collections import Counter
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)  # a container: version u16, header u16, size u64 behind it
HEADER, BINARY, ARCHITECTURE_AT = 16, 2, 28  # an entry: kind, version u16, header u32, size u64, …


def pruned(library: bytes, architecture: int) -> tuple[bytes, Counter[tuple[int, int]]]:
    """The library with binaries of `architecture` alone; and the bytes of (kind, architecture)."""
    data, at, sizes = bytearray(library), 0, Counter[tuple[int, int]]()
    while (at := data.find(MAGIC, at)) >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, at)
        if version != 1 or header != HEADER:
            at += 4
            continue
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, head, length = struct.unpack_from("<HHIQ", data, entry)
            (found,) = struct.unpack_from("<I", data, entry + ARCHITECTURE_AT)
            sizes[kind, found] += length
            if (kind, found) != (BINARY, architecture):
                data[entry + head : entry + head + length] = bytes(length)
            entry += head + length
        at = end
    return bytes(data), sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--architecture", type=int, default=90)
    given = parser.parse_args()
    data, sizes = pruned(given.library.read_bytes(), given.architecture)
    if not sizes[BINARY, given.architecture]:
        parser.error(f"no code of {given.architecture} in it; (kind, architecture): {sizes}")
    given.out.write_bytes(lzma.compress(data, preset=6) if given.out.suffix == ".xz" else data)
    print(f"{given.out.name}: {given.out.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

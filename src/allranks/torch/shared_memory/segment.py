"""Memory that several processes of one host map, without a name that could be left behind.

One process creates a memfd and sends its place ("pid:fd"); the others open `/proc/PID/fd/FD`.
Untouched pages cost nothing. After all have mapped it, the file descriptor is closed. The kernel
then frees the memory with the last process that maps it, however that one ends.

Two processes share a host if they agree on `host_identity`: same boot, same namespace of process
ids, so that "pid" means the same to both, and same network, so that simulated nodes are hosts.

`library` is the C library which computes in this memory, if it was compiled at installation.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from allranks.torch.native import built

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_REFUSED = ctypes.c_void_p(-1).value


def host_identity() -> str:
    """A text, equal in processes which can map each other's memory; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net")]
    except OSError:
        return ""
    return " ".join([boot, *spaces])


class Segment:
    """`nbytes` of shared memory at `address` of this process, until `unmap` or its last reference.

    It starts as zeros. Other processes can open it at `where` until `hide` is called.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map the file `fd`, which this object closes; raises `OSError`."""
        self.fd, self.nbytes, self.address = fd, nbytes, 0
        try:
            read_and_write = mmap.PROT_READ | mmap.PROT_WRITE
            address = _libc.mmap(None, nbytes, read_and_write, mmap.MAP_SHARED, fd, 0)
            if address in (None, _REFUSED):
                error = ctypes.get_errno()
                raise OSError(error, f"mmap of {nbytes} bytes: {os.strerror(error)}")
        except BaseException:
            self.hide()
            raise
        self.address = int(address)

    @classmethod
    def create(cls, nbytes: int, name: str) -> Segment:
        """A new segment; tools such as lsof show its `name`, which has no other use."""
        return cls.within(os.memfd_create(name, os.MFD_CLOEXEC), nbytes)

    @classmethod
    def within(cls, fd: int, nbytes: int) -> Segment:
        """A segment in an open memory file, which is made large enough."""
        try:
            if os.fstat(fd).st_size < nbytes:
                os.ftruncate(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
        return cls(fd, nbytes)

    @classmethod
    def open(cls, where: str, nbytes: int) -> Segment:
        """The segment of another process of this host; raises `OSError` if it cannot be opened."""
        pid, _, number = where.partition(":")
        fd = os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_size < nbytes:
            os.close(fd)
            raise OSError(f"{where} is smaller than {nbytes} bytes: it is not what was announced")
        return cls(fd, nbytes)

    @property
    def where(self) -> str:
        return f"{os.getpid()}:{self.fd}"

    def hide(self) -> None:
        """Close the file, so that no other process can open it; mappings stay."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def unmap(self) -> None:
        """Unmap the memory. The address must not be used any more."""
        self.hide()
        address, self.address = self.address, 0
        if address:
            _libc.munmap(address, self.nbytes)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # a thread of the library may still use the memory
            self.unmap()


NOT_BUILT = "the library for it was not compiled where allranks was installed (no C compiler?)"


def library() -> ModuleType | None:
    """The module `_collectives`; `None` if it was not compiled."""
    return built("allranks.torch.shared_memory._collectives")

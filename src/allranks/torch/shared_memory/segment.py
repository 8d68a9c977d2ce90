"""Memory that several processes of one host have mapped, with no name that could be left behind.

One process makes a memfd and says where it is ("pid:fd"); the others open `/proc/PID/fd/FD`. Pages
that nobody touches cost nothing. Once all have mapped it the file descriptor is closed: from then
on the kernel takes the memory back with the last process that has it, however that one ends.

Two processes share a host if they agree on `host_identity`: same boot, same namespace of process
ids, so that "pid" means the same to both, and same network, so that simulated nodes are hosts.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_REFUSED = ctypes.c_void_p(-1).value


def host_identity() -> str:
    """What two processes have in common if they can map each other's memory; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net")]
    except OSError:
        return ""
    return " ".join([boot, *spaces])


class Segment:
    """`nbytes` of shared memory at `address` of this process, until `unmap` or its last reference.

    It starts as zeros. `where` says to others how to open it, while `hide` has not been called.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map what is behind `fd`, which this object closes; raises `OSError`."""
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
    def made(cls, nbytes: int, name: str) -> Segment:
        """A new one; `name` is what tools like lsof show, and means nothing."""
        return cls.within(os.memfd_create(name, os.MFD_CLOEXEC), nbytes)

    @classmethod
    def within(cls, fd: int, nbytes: int) -> Segment:
        """In a memory file that this process was given, made large enough if it is not."""
        try:
            if os.fstat(fd).st_size < nbytes:
                os.ftruncate(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
        return cls(fd, nbytes)

    @classmethod
    def opened(cls, where: str, nbytes: int) -> Segment:
        """That of another process of this host; raises `OSError` where it cannot be opened."""
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
        """Nobody can open it from now on; what is mapped stays so."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def unmap(self) -> None:
        """Give the memory back. Nothing may use the address any more."""
        self.hide()
        address, self.address = self.address, 0
        if address:
            _libc.munmap(address, self.nbytes)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # what a thread of the library may still touch goes last
            self.unmap()

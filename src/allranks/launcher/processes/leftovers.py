"""What a run could leave behind, found by the name that all of it carries, and removed.

Every fork server has an owner: the id and the start time of the process that made it, and where
these hold, which no other process ever has. The name of the owner stands in the environment of all
its descendants, also of those that left its process group or session, and in the names of its
temporary folders. Nothing without such a name is ever touched, and nothing of other machines and
containers: whether their processes live cannot be seen here.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import re
import shutil
import signal
import stat
import tempfile
import time
import zlib
from pathlib import Path

from allranks.launcher.processes.linux import started_at, state_of

VARIABLE = "ALLRANKS_OWNER"
SCRATCH = "allranks-scratch-"
BOOT = Path("/proc/sys/kernel/random/boot_id")
PATIENCE_S = 5.0
LONGEST_OF_SOCKETS = 88  # of a path; with the name of a socket in it 107 is the most there is
_OWNER = re.compile(r"([0-9]{1,9})\.([0-9]{1,20})\.([0-9a-f]{8})")


def owner() -> str:
    """The name of this process, as its descendants carry it."""
    return f"{os.getpid()}.{started_at(os.getpid())}.{_here()}"


def belongs_to_a_job() -> bool:
    """Whether this process is a rank, or was started by one."""
    return _OWNER.match(os.environ.get(VARIABLE, "")) is not None


def _here() -> str:
    """Where process ids are those of this process: this machine, and the container on it."""
    space, boot = os.readlink("/proc/self/ns/pid"), BOOT.read_text().strip()
    return f"{zlib.crc32(f'{boot} {space}'.encode()):08x}"


def is_dead(name: str) -> bool:
    """Whether this is the name of an owner that ran here, and runs no more (it may be a zombie)."""
    named = _OWNER.fullmatch(name)
    if named is None or named[3] != _here():
        return False
    pid = int(named[1])
    return started_at(pid) != named[2] or state_of(pid) in ("", "Z", "X")


def processes_of(mark: str) -> list[int]:
    """The living processes of this user whose environment says that they belong to `mark`."""
    return [pid for pid, name in _marked() if name == mark]


def end_processes_of(mark: str) -> None:
    """Kill them all, those that are started meanwhile too, and wait until they are gone.

    What they kept in shared memory and files goes last: one that is killed may still be making a
    name. The temporary folder of those processes may be another than that of this one.
    """
    deadline, killed = time.monotonic() + PATIENCE_S, set()
    temporary = {tempfile.gettempdir()}
    while (pids := processes_of(mark)) and time.monotonic() < deadline:
        killed.update(pids)
        for pid in pids:
            temporary.update(_temporary_folders_of(pid))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # an orphan that this process adopted
                os.waitpid(pid, 0)
        time.sleep(0.005)
    for pid in killed:
        remove_shared_memory(pid)
    for folder in temporary:
        for path in Path(folder).glob(f"{_prefix_of(mark)}*"):
            _remove(path)


def sweep(within: Path | None = None) -> None:
    """End the processes and remove the folders of owners that are dead, however they died.

    The folders are those that hold temporary files, and `within`.
    """
    for mark in {mark for _, mark in processes_left()}:
        end_processes_of(mark)
    for path in folders_left(within):
        _remove(path)


def processes_left() -> list[tuple[int, str]]:
    """(process, mark) of all living processes of this user whose owner is dead."""
    return [(pid, mark) for pid, mark in _marked() if is_dead(mark.partition("/")[0])]


def folders_left(within: Path | None = None) -> list[Path]:
    """The temporary folders of owners that are dead, here and in `within`."""
    left_folders = []
    folders = [Path(tempfile.gettempdir()), *([] if within is None else [within])]
    for path in [path for folder in folders for path in folder.glob(f"{SCRATCH}*")]:
        with contextlib.suppress(OSError):  # another start sweeps too, and was quicker
            there = path.lstat()
            ours = stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid()
            if ours and is_dead(owner_of(path)):
                left_folders.append(path)
    return left_folders


def owner_of(folder: Path) -> str:
    """The owner that a scratch folder is named after."""
    return folder.name.removeprefix(SCRATCH).partition("-")[0]


def scratch_folder(within: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder that carries the name of this process; `within` one that nodes share."""
    return tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{owner()}-", dir=within)


def name_folder_of_sockets() -> None:
    """Give the folder in which multiprocessing passes files a name that says whose it is.

    Its own is random, and stays behind when a rank is killed that has loader workers.
    """
    path = _folder_of_sockets(os.getpid())
    with contextlib.suppress(OSError):  # a full disk: then it makes its own, when it needs one
        if len(os.fsencode(path)) <= LONGEST_OF_SOCKETS:
            path.mkdir(0o700)
            multiprocessing.process.current_process()._config["tempdir"] = str(path)  # type: ignore[attr-defined]


def note_names() -> None:
    """Note, in the folder of sockets of its rank, that this process names shared memory.

    A loader process that was killed with its rank, and with all that watched them, is known by it.
    """
    folder = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    with contextlib.suppress(OSError):  # the rank has ended: this process is about to
        if folder and Path(folder).name.startswith(SCRATCH):
            Path(folder, str(os.getpid())).touch()


def _folder_of_sockets(pid: int) -> Path:
    return Path(tempfile.gettempdir(), f"{_prefix_of(os.environ.get(VARIABLE, ''))}{pid}")


def _prefix_of(mark: str) -> str:
    """How the folders of sockets of all ranks of one fork server begin."""
    return f"{SCRATCH}{mark.replace('/', '-')}-"


def remove_loader_files(pid: int) -> None:
    """What data loaders keep, under the id of a process that ended, in shared memory and files."""
    _remove(_folder_of_sockets(pid))
    remove_shared_memory(pid)


def _remove(folder: Path) -> None:
    """Remove a folder, and the shared memory of the processes it is named after or that it names.

    Of processes that ended only: an id may have been given again.
    """
    named = [folder.name.rpartition("-")[2]]
    with contextlib.suppress(OSError):
        named += os.listdir(folder)
    for pid in (int(name) for name in named if re.fullmatch("[0-9]{1,9}", name)):
        if state_of(pid) in ("", "Z", "X"):
            remove_shared_memory(pid)
    shutil.rmtree(folder, ignore_errors=True)


def remove_shared_memory(pid: int) -> None:
    """Remove the shared memory that torch's data loaders named by an ended process's id."""
    for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _marked() -> list[tuple[int, str]]:
    """(process, mark) of all living processes of this user that carry one, but this one."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            if pid == os.getpid() or folder.stat().st_uid != os.geteuid():
                continue
        except OSError:
            continue
        mark = _environment_of(pid).get(VARIABLE)
        if mark is not None and state_of(pid) not in ("", "Z"):
            processes.append((pid, mark))
    return processes


def _temporary_folders_of(pid: int) -> list[str]:
    """Where a process may keep temporary files: the folders that `tempfile` takes the first of."""
    environment = _environment_of(pid)
    named = [environment.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    return [folder for folder in (*named, "/tmp") if os.path.isabs(folder)]


def _environment_of(pid: int) -> dict[str, str]:
    """The variables that a process was started with; none of one that has ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (variable.decode(errors="replace").partition("=") for variable in variables)
    return {name: value for name, _, value in pairs}

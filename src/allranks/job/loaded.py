"""Which files of the user's a program was loaded from, and their digests as they were then.

A file may be edited while a job runs: what a checkpoint says of the program must be true of what
was loaded. So a file is read when it is imported, and never again. Files of this package, of
installed packages and of the standard library are not the user's: their versions stand elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from itertools import islice
from pathlib import Path
from types import ModuleType

INSTALLED = ("site-packages", "dist-packages")
PROGRAM, MODULES = "program_sha256", "modules_sha256"
_digests: dict[str, tuple[Path, str]] = {}  # name of a module -> its file, as it was imported
_programs: dict[str, str] = {}  # whole path of a file that is a program -> its digest
_inherited: dict[str, int] = {}  # the last module before the fork -> how many there were


def remember_program(path: Path, content: bytes) -> None:
    """The file of a program is about to run, with this content."""
    _programs[str(path.resolve())] = hashlib.sha256(content).hexdigest()


def program_facts(program: str) -> dict[str, object]:
    """The digest of the file of a program, as loaded, and those of the user's modules by name.

    The first is `None` where the program is a module or a built-in one: then it is among the
    modules, or among the files of this package.
    """
    path = Path(program if program.endswith(".py") else program.rpartition(":")[0]).resolve()
    facts: dict[str, object] = {PROGRAM: _programs.get(str(path)) or file_sha256(program)}
    if modules := _modules_besides(path):
        facts[MODULES] = modules
    return facts


def file_sha256(program: str) -> str | None:
    """The digest of the file of a program as it is on disk now; `None` where it is no file."""
    path = Path(program if program.endswith(".py") else program.rpartition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def by_name(facts: dict[str, object]) -> dict[str, object]:
    """The same facts, each module by itself: `module helpers` -> its digest."""
    modules = facts.get(MODULES)
    rest = {name: value for name, value in facts.items() if name != MODULES}
    if isinstance(modules, dict):
        rest |= {f"module {name}": digest for name, digest in modules.items()}
    return rest


def remember_modules() -> None:
    """Take the digests of all modules so far. The fork server calls this before it forks.

    A rank that looked through thousands of modules would copy the memory in which they lie.
    """
    _take_digests()
    _inherited.clear()
    _inherited[next(reversed(sys.modules))] = len(sys.modules)


def _modules_besides(program: Path) -> dict[str, str]:
    """Those that are imported by now; a digest is taken when a module is first seen here."""
    _take_digests()
    return {
        name: digest
        for name, (path, digest) in sorted(_digests.items())
        if name in sys.modules and path != program
    }


def _take_digests() -> None:
    for name, module in _imported_since():
        path = _file_of_a_user(module)
        if path is None or name == "__main__" or name in _digests:
            continue
        if path.is_file():
            _digests[name] = path, hashlib.sha256(path.read_bytes()).hexdigest()


def _imported_since() -> list[tuple[str, ModuleType]]:
    """What came after the modules that the fork server has looked at; without one, all there is."""
    for last, count in _inherited.items():
        new = list(islice(reversed(sys.modules.items()), max(0, len(sys.modules) - count) + 1))
        if new[-1][0] == last:
            return new
    return list(sys.modules.items())


def _file_of_a_user(module: ModuleType) -> Path | None:
    """Paths are compared as texts first: a rank has thousands of modules, and few are a user's."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or _is_known(file):
        return None
    path = Path(file).resolve()
    return None if _is_known(str(path)) else path


def _is_known(file: str) -> bool:
    return file.startswith(_KNOWN) or any(f"{os.sep}{part}{os.sep}" in file for part in INSTALLED)


_FOLDERS = (
    Path(__file__).parents[1],
    *(Path(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib")),
)
_KNOWN = tuple(f"{path}{os.sep}" for folder in _FOLDERS for path in (folder, folder.resolve()))

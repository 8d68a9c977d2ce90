"""Files that a rank writes, and lines that it prints, each with the line of the script."""

from __future__ import annotations

import builtins
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from zlib import crc32

from allranks.tools.watching.facts import Facts, wrap

MOST_FILES, MOST_OF_A_LINE, MOST_LINES = 1000, 8, 200
PASSING = ("/dev/", "/proc/", "/sys/")
ENDINGS = (".lock", ".pyc", ".jsonl.part")


class Files:
    """What this process writes where."""

    def __init__(self, torch: Any, facts: Facts) -> None:
        self.torch, self.facts = torch, facts
        self._seen: set[tuple[str, str]] = set()
        self._lines: Counter[Any] = Counter()
        self._inside = False
        caches = (os.path.expanduser("~/.cache"), os.environ.get("XDG_CACHE_HOME"))
        self._caches = tuple(os.path.join(one, "") for one in caches if one)

    def install(self) -> None:
        """Wrap `torch.save` and `print`; hear of every file that Python opens."""
        saved, printed = self.facts.guarded(self._saved), self.facts.guarded(self._printed)
        opened = self.facts.guarded(self._opened)

        def saving(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
                saved(f)
                return own(obj, f, *args, **kwargs)

            return inner

        def printing(own: Callable[..., Any]) -> Callable[..., Any]:
            def inner(*args: Any, **kwargs: Any) -> None:
                file = kwargs.get("file")
                if file is None or file is sys.stdout or file is sys.stderr:
                    printed(args)
                own(*args, **kwargs)

            return inner

        def heard(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and not self._inside and isinstance(args[0], str | os.PathLike):
                self._inside = True
                try:
                    opened(*args)
                finally:
                    self._inside = False

        caches = (os.path.expanduser("~/.cache"), os.environ.get("XDG_CACHE_HOME"))
        self._caches = tuple(os.path.join(one, "") for one in caches if one)

        wrap(self.torch, "save", saving)
        wrap(self.torch.serialization, "save", lambda own: self.torch.save)
        wrap(builtins, "print", printing)
        sys.addaudithook(heard)

    def _saved(self, target: Any) -> None:
        name = target if isinstance(target, str | os.PathLike) else getattr(target, "name", None)
        if isinstance(name, str | os.PathLike):
            self._tell("save", name)

    def _opened(self, path: Any, mode: str | None, flags: int) -> None:
        writes = bool(set(mode) & set("wx")) if mode else bool(flags & os.O_CREAT)
        if writes and not (flags & os.O_APPEND):
            self._tell("open", path)

    def _tell(self, how: str, name: str | os.PathLike[str]) -> None:
        path = os.path.realpath(name)
        passing = path.startswith(PASSING) or path.endswith(ENDINGS)
        passing = passing or path.startswith(self._caches)
        if passing or path.startswith(self.facts.folder) or (how, path) in self._seen:
            return
        if len(self._seen) < MOST_FILES:
            self._seen.add((how, path))
            self.facts.tell("file", how=how, path=path, where=self.facts.where())

    def _printed(self, args: tuple[Any, ...]) -> None:
        where = self.facts.where()
        if self._lines[where] < MOST_OF_A_LINE and self._lines.total() < MOST_LINES:
            self._lines[where] += 1
            text = " ".join(map(str, args))
            self.facts.tell("print", where=where, text=text[:80], digest=crc32(text.encode()))

"""A traceback for users: the lines of their own code, and how many others. Pure.

The whole of it stays in the events of the rank.
"""

from __future__ import annotations

import re
from itertools import groupby

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line \d+, in ')
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(?P<package>[^/.]+)")
_STANDARD = re.compile(r"/lib/python3[^/]*/|^<frozen ")


def folded(traceback: str) -> str:
    """The traceback without frames of installed packages; as it is if there are no others."""
    lines = traceback.splitlines()
    owners: list[str] = []
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            owners.append(_owner_of(frame["file"]))
        elif owners and owners[-1] != ROOT and line.startswith("    "):
            owners.append(owners[-1])  # the line of code of that frame, and its marks
        else:
            owners.append(ROOT)
    if USER not in owners:
        return traceback
    shown: list[str] = []
    for is_folded, group in groupby(
        zip(lines, owners, strict=True), lambda one: one[1] not in (USER, ROOT)
    ):
        part = list(group)
        if not is_folded:
            shown += [line for line, _ in part]
            continue
        count = sum(_FRAME.match(line) is not None for line, _ in part)
        who = dict.fromkeys(owner for _, owner in part)
        shown.append(f"  … {count} frame{'s' if count > 1 else ''} of {', '.join(who)}")
    return "\n".join(shown)


USER, ROOT = "the user", ""


def _owner_of(file: str) -> str:
    installed = _INSTALLED.search(file)
    if installed is not None:
        return installed["package"]
    if _STANDARD.search(file):
        return "Python"
    return "allranks" if file.startswith(_PACKAGE_FOLDER) else USER


_PACKAGE_FOLDER = __file__.rpartition("/launcher/")[0] + "/"

"""A stand-in for `sbatch` that records what it reads in scripts:
`fake_sbatch.py RECORD OPTION… FILE…`.

The lines of `#SBATCH` are cut as sbatch cuts them, by the rules of its `_get_argument`: a backslash
takes the next letter as it is, quotes hold blanks together, a `#` outside of them begins a comment.
Versions differ: the old (2.x) knew double quotes only and saw a `#` in them too; the newer blank
the word `packjob` (and `hetjob`) wherever a line has it. Both are recorded.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

BLANKS = " \t\r\v\f\n"


class Refused(Exception):
    """What sbatch stops with."""


def arguments(line: str, *, old: bool) -> list[str]:
    """The words of one line, after its `#SBATCH`."""
    found, position = [], 0
    while True:
        if not old:
            line = line[:position] + re.sub(
                "(?i)packjob|hetjob", lambda m: " " * len(m[0]), line[position:]
            )
        while position < len(line) and line[position] in BLANKS:
            position += 1
        if position >= len(line) or line[position] == "#":
            return found
        if line[position] == ":":
            raise Refused(f"Unexpected `:` in [{line}]")
        word, position = _word(line, position, old=old)
        found.append(word)


def _word(line: str, position: int, *, old: bool) -> tuple[str, int]:
    word, quote, escaped = "", "", False
    while position < len(line) and (quote or line[position] not in BLANKS):
        letter = line[position]
        if escaped:
            escaped = False
            word += letter
        elif letter == "\\":
            escaped = True
        elif quote and letter == quote:
            quote = ""
        elif not quote and letter in ('"' if old else "\"'"):
            quote = letter
        elif letter == "#" and (old or not quote):
            break
        else:
            word += letter
        position += 1
    if quote:
        raise Refused(f"Unmatched `{quote}` in [{line}]")
    return word, position


def read_script(text: str, *, old: bool) -> list[str]:
    """All arguments of a script: up to its first command, or, in old versions, anywhere in it."""
    if not text.startswith("#!"):
        raise Refused("This does not look like a batch script")
    if "\0" in text or "\r\n" in text:
        raise Refused("Batch script contains NUL or DOS line breaks")
    words: list[str] = []
    for line in text.split("\n"):
        if line.startswith("#SBATCH"):
            words += arguments(line.removeprefix("#SBATCH"), old=old)
        elif not old and line.strip() and not line.lstrip().startswith("#"):
            break
    return words


def main() -> None:
    record, *words = sys.argv[1:]
    options = [word for word in words if word.startswith("-")]
    with open(record, "a", encoding="utf-8") as file:
        for name in (word for word in words if not word.startswith("-")):
            text = Path(name).read_text("utf-8")
            mode = oct(Path(name).stat().st_mode & 0o777)
            new, old = read_script(text, old=False), read_script(text, old=True)
            row = {"file": name, "options": options, "new": new, "old": old, "mode": mode}
            file.write(json.dumps(row) + "\n")
    print("4711;here" if "--parsable" in options else "Submitted batch job 4711")


if __name__ == "__main__":
    main()

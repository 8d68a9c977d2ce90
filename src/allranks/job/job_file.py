"""Job files: a job as TOML text and back, so that the job of any run folder can be run again.

Values that look like secrets are never written; who resumes the job gives them again.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.errors import RequestError, nearest
from allranks.job.job import Job, Tracing, names_in, read_value

SCHEMA = 1
FOR_CHECK = names_in(Tracing)
NOT_SETTABLE = ("task", *FOR_CHECK)
HIDDEN = "[redacted]"
_SECRET_WORD = re.compile(  # one word of a name, small letters
    r"(api|access|private|secret|auth|ssh|account)?key|\w*tokens?|\w*secrets?|bearer"
    r"|\w*pass|pwd|pw|cred(ential)?s?|auth(orization)?|jwts?|pats?|cookies?"
    r"|\w*(password|passwd|passphrase)s?"
)
_SECRET_VALUE = re.compile(  # a password in a URL; how common services begin their keys
    r"://[^/\s:@]*:[^/\s@]+@"
    r"|\b(sk-|[sr]k_(live|test)_|gh[pousr]_|github_pat_|glpat-|hf_|xox[abpr]-)[\w-]{8}"
    r"|\b(nvapi-|npm_|pypi-|dckr_pat_|dapi|r8_|AIza|ya29\.)[\w-]{16}"
    r"|\bA[KS]IA[0-9A-Z]{12}|\beyJ[\w-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_SECRET_INSIDE = re.compile(  # said by the text itself, which is a command or a list of settings
    r"(?i)\b(bearer|basic)\s+[\w+/.~-]{8}"
    r"|(password|passwd|passphrase|secret|token|jwt|(api|access|account)[_-]?key|_pass|_pwd|_pat)"
    r"\s*=\s*[^\s;&]"
)


def read_job_file(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a job file, and those of its `[task]` table; raises `RequestError`."""
    return job_values(_read(path), path)


def read_given(path: str) -> frozenset[str]:
    """The names of the values that somebody gave, by the `[source]` table of a `job.toml`.

    None where it has no such table, as those that people write.
    """
    sources = _read(path).get("source")
    if not isinstance(sources, dict):
        return frozenset()
    return frozenset(name for name, source in sources.items() if source != "default")


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            asked=f"--job {path}",
            found=str(error) or type(error).__name__,
            why="a job file is TOML text, as `job.toml` in a run folder",
            do="check the path and the line",
        ) from None


def job_values(data: dict[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a job, and those of its task, as `path` has them; raises `RequestError`."""
    data = dict(data)
    schema = data.pop("schema", SCHEMA)
    for name in ("source", "proof"):  # what a run folder says about its job
        data.pop(name, None)
    task = data.pop("task", {})
    if schema != SCHEMA or not isinstance(task, dict):
        raise RequestError(
            asked=f"--job {path}",
            found=f"schema {schema}",
            why=f"this version reads schema {SCHEMA}, with the task's fields in a table [task]",
            do="start from the job.toml of a run folder",
        )
    hints = {f.name: f.type for f in dataclasses.fields(Job)}
    kinds: dict[str, Any] = {"str": str, "int": int, "bool": bool, "int | None": int | None}
    kinds |= {"float": float, "float | None": float | None}
    known = {name: kinds[str(kind)] for name, kind in hints.items() if name not in NOT_SETTABLE}
    for name, value in data.items():
        if name not in known:
            raise RequestError(
                asked=f"{name} = {value!r} in {path}",
                found=f"no value {name!r} in a job",
                why="a misspelt line must not be passed over",
                do=nearest(name, known),
            )
        data[name] = read_value(name, value, known[name], f"{name} = {value!r} in {path}")
    data.pop("run_dir", None)
    return data, task


def redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without the texts that are keys, tokens or passwords, by their names or looks."""
    return {
        name: HIDDEN if isinstance(value, str) and value and _is_secret(name, value) else value
        for name, value in values.items()
    }


def _is_secret(name: str, value: str) -> bool:
    words = re.split(r"[\W_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    if any(_SECRET_WORD.fullmatch(word) for word in words) or "api_key" in name.lower():
        return True
    return bool(_SECRET_VALUE.search(value) or _SECRET_INSIDE.search(value))


def write_toml(values: dict[str, Any]) -> str:
    """A mapping of plain values and of tables of them as TOML; `None` is left out."""
    plain = {name: value for name, value in values.items() if not isinstance(value, dict)}
    lines = [f"{_key(n)} = {_toml(v)}" for n, v in plain.items() if v is not None]
    for name, table in values.items():
        if isinstance(table, dict):
            lines += ["", f"[{_key(name)}]"]
            lines += [f"{_key(n)} = {_toml(v)}" for n, v in table.items() if v is not None]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text) + '"'

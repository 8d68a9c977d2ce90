"""The weights of a checkpoint as one safetensors file, with the model's own names.

Verified first, then put together tensor by tensor from the chunks that ranks wrote. Needs no
framework. Optimizer and random streams stay where they are:
the file is for those who use the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from allranks.checkpoint.folder import verify_files
from allranks.checkpoint.format import BadCheckpoint, Manifest, TensorFiles, read_manifest
from allranks.checkpoint.tensor_file import COMPLEX, PAIR, Layout, as_written, lay_out
from allranks.errors import RequestError

MODEL = "common/model/"
EVALUATED = "common/evaluated/"
"""Of an optimizer with two modes: its steps go on from the weights of the model."""
WRITTEN_AS = (("~3", ""), ("~2", "@"), ("~1", "/"), ("~0", "~"))


def export_weights(folder: Path, target: Path) -> list[str]:
    """Write the weights of the checkpoint `folder` to `target`; returns their names.

    Raises `BadCheckpoint` if not all of it holds, and `RequestError` if `target` is there, cannot
    be written, or there are no weights. `target` is there whole, or not at all.
    """
    check_free(target)
    manifest = verified(folder)
    weights = {
        model_name(path, below): (path, tensor)
        for below in (MODEL, EVALUATED)
        for path, tensor in manifest.tensors.items()
        if path.startswith(below)
    }
    for name in _not_persistent(manifest):
        weights.pop(name, None)
    if not weights:
        raise refused(target, f"no tensor below {MODEL} in {folder}", "there is no model in it")
    pairs = sorted(name for name, (_, t) in weights.items() if t.dtype in PAIR)
    layout = lay_out(
        {name: as_written(t.dtype, t.shape) for name, (_, t) in weights.items()},
        {COMPLEX: json.dumps(pairs)} if pairs else None,
    )
    with TensorFiles(folder) as source:
        _write(target, layout, (source.bytes_of(*weights[name]) for name in layout.pieces))
    return sorted(weights)


def _not_persistent(manifest: Manifest) -> list[str]:
    """The buffers that a strict load of the model would not know."""
    try:
        return list(manifest.values["common"]["not_persistent"])
    except (TypeError, KeyError):  # of an older version, or of another engine
        return []


def check_free(target: Path) -> None:
    """Raise `RequestError` if something is there, be it a link to nothing."""
    if os.path.lexists(target):
        kind = "folder" if target.is_dir() else "file"
        raise refused(target, f"a {kind} is there already", "an export never writes over one")


def verified(folder: Path) -> Manifest:
    """The manifest of a checkpoint all of whose files hold; raises `BadCheckpoint`."""
    manifest = read_manifest(folder)
    problems = verify_files(folder, manifest, manifest.files)
    if problems:
        raise BadCheckpoint("; ".join(problems))
    return manifest


def model_name(path: str, below: str = MODEL) -> str:
    """`common/model/0.weight` -> `0.weight`: what the model calls the tensor of that path."""
    name = path.removeprefix(below)
    for written, meant in WRITTEN_AS:
        name = name.replace(written, meant)
    return name


def _write(target: Path, layout: Layout, tensors: Iterator[bytes | bytearray]) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(layout.header)
            for tensor in tensors:
                file.write(tensor)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(target)
    except OSError as error:
        raise refused(target, str(error), "it cannot be written there") from None
    finally:
        temporary.unlink(missing_ok=True)


def refused(target: Path, found: str, why: str) -> RequestError:
    """The error for an export that cannot be made."""
    return RequestError(
        asked=f"to export weights to {target}", found=found, why=why, do="name another file, or run"
    )

"""`allranks new TEMPLATE [FILE]`: a task to edit, which trains and checks as it is."""

from __future__ import annotations

import sys
from keyword import iskeyword
from pathlib import Path

import click

from allranks.cli.options import Verb
from allranks.errors import RequestError, nearest, printable
from allranks.job.program import FOREIGN

TAKEN = FOREIGN | sys.stdlib_module_names | {"allranks"}
"""Modules that a task or its libraries import: a file of that name would hide them."""
TEMPLATES = {
    "plain": "torch: a model, tensors, a loss",
    "images": "torch: a folder of images, or images made up",
    "transformers": "torch: a language model of transformers, made from a configuration",
    "keras": "Keras 3, on TensorFlow or torch",
}


@click.command(cls=Verb)
@click.argument("template")
@click.argument("file", default="mytask.py")
def new(template: str, file: str) -> None:
    """Write a task from TEMPLATE into FILE (default mytask.py): edit it, it runs as it is.

    \b
    allranks new plain
    allranks new images photos.py

    \b
    plain         torch: a model, tensors, a loss
    images        torch: a folder of images, or images made up
    transformers  torch: a language model of transformers, made from a configuration
    keras         Keras 3, on TensorFlow or torch
    """
    path = Path(file)
    if template not in TEMPLATES:
        why = f"there is one for {', '.join(TEMPLATES)}"
        raise _refused(
            template, file, f"no template {template!r}", nearest(template, TEMPLATES), why
        )
    if path.suffix != ".py" or not path.stem.isidentifier():
        why = "ranks import the file, so it is named as a Python module"
        raise _refused(template, file, f"the name {path.name!r}", "a name like mytask.py", why)
    if path.stem in TAKEN or iskeyword(path.stem):
        why = "it is a keyword, or a module that tasks and their libraries import"
        raise _refused(template, file, f"the name {path.name!r}", "a name like mytask.py", why)
    text = Path(__file__).with_name(f"{template}.py.txt").read_text()
    try:
        with path.open("x") as written:
            written.write(text.replace("FILE.py", path.name))
    except FileExistsError:
        raise _refused(
            template, file, f"{file} is there", f"allranks new {template} OTHER.py"
        ) from None
    except OSError as error:
        raise _refused(
            template, file, str(error.strerror), "name a file in a folder to write in"
        ) from None
    click.echo(printable(f"written {file}. Next:"))
    for verb in ("train", "check"):
        click.echo(printable(f"  allranks {verb} {file} --ranks 2"))


def _refused(
    template: str,
    file: str,
    problem: str,
    do: str,
    why: str = "it writes a new file, over no other",
) -> RequestError:
    return RequestError(asked=f"allranks new {template} {file}", found=problem, why=why, do=do)

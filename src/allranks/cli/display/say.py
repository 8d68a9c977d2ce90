"""What a verb tells a person, on standard error."""

from __future__ import annotations

from contextlib import suppress

import click

from allranks.errors import printable


def say(text: str) -> None:
    """Write the lines of `text` to standard error; a reader that is gone ends nothing."""
    with suppress(OSError, ValueError):
        for line in text.splitlines():
            click.echo(printable(line), err=True)

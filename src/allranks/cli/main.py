"""`allranks`: the door. Knows the verbs by name only, so that help imports nothing heavy."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from contextlib import suppress

import click

from allranks import __version__
from allranks.catalog import VERBS, load
from allranks.cli.display.progress import say
from allranks.errors import (
    EXIT_BAD_REQUEST,
    EXIT_INTERRUPTED,
    EXIT_PLACE_FAILED,
    AllranksError,
    RequestError,
    nearest,
)


class Verbs(click.Group):
    """The verbs of the catalog, each imported only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            ctx.fail(f"no verb {cmd_name!r}; {nearest(cmd_name, VERBS)}")
        command: click.Command = load(VERBS[cmd_name][0])
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, meaning) for name, (_, meaning) in VERBS.items()])


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__)
def cli() -> None:
    """One training program on any number of ranks, and proof that the result is the same.

    Exit codes: 0 done, 1 the program failed, 2 the request or the task was wrong, 3 the place
    failed, 4 stopped early after a checkpoint, 5 a check found a difference, 6 a check could not
    decide, 130 interrupted.
    """


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line; an error becomes its message and its exit code.

    A terminal or a reader that is gone changes no exit code.
    """
    try:
        _run()
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # Python would try again as it ends, and leave with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _too_long(name: str) -> RequestError:
    return RequestError(
        asked=name,
        found=f"a path of {len(os.fsencode(name))} bytes",
        why="the file system takes no name as long as that",
        do="check the path: a name between two slashes has 255 bytes at most",
    )


def _run() -> None:
    signal.signal(signal.SIGTERM, _interrupt)  # before and after a job, which notes it by itself
    try:
        cli(prog_name="allranks", standalone_mode=False)
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        say("allranks: interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except AllranksError as error:
        lead = "this cannot be done\n" if isinstance(error, RequestError) else ""
        text = f"allranks: {lead}{error}"
        say(text)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            say(f"allranks: this cannot be done\n{_too_long(str(error.filename))}")
            sys.exit(EXIT_BAD_REQUEST)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            say(
                f"allranks: a disk is full: {error}. Make room there; TMPDIR names the folder of "
                "temporary files"
            )
            sys.exit(EXIT_PLACE_FAILED)
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        say(
            f"allranks: too many open files: a process may have {most} here, and each rank needs "
            "some. Raise the limit in the shell before you start: ulimit -n 1024"
        )
        sys.exit(EXIT_PLACE_FAILED)


if __name__ == "__main__":
    main()

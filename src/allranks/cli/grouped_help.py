"""Help in the groups of a job: what people use first on top, then what, where, numbers, safety."""

from __future__ import annotations

import click

from allranks.job.job import GROUPS, names_in

FIRST = (
    *("--ranks", "--nodes", "--strategy", "--set", "--epochs", "--bitwise", "--run-dir"),
    *("--checkpoint-every", "--max-restarts", "--dry-run"),
)
NO_FIELDS = {  # options that are no field of a job
    "What is trained": ("--job",),
    "Where": (
        *("--slots", "--ranks-per-node", "--hosts", "--rendezvous", "--id", "--node-rank"),
        *("--interface", "--join-timeout", "--node-timeout", "--per-rank"),
    ),
    "Looking": ("--placement", "--deep", "--keep-runs", "--json", "--help"),
}


def option_groups() -> dict[str, list[str]]:
    """The options of all verbs by the titles of their groups, each in one group."""
    groups = {"First of all": list(FIRST)}
    for title, group in GROUPS.items():
        fields = [f"--{name.replace('_', '-')}" for name in names_in(group)]
        groups[title] = [flag for flag in fields if flag not in FIRST]
        groups[title] += NO_FIELDS.get(title, ())
    return groups


class GroupedCommand(click.Command):
    """A command whose options are shown in these groups, and in their order."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {
            max(option.opts, key=len): row
            for option in self.get_params(ctx)
            if (row := option.get_help_record(ctx)) is not None
        }
        for title, names in option_groups().items():
            shown = [rows[name] for name in names if name in rows]
            if shown:
                with formatter.section(title):
                    formatter.write_dl(shown)

"""Help in groups: what people use first on top, then what, where, numbers, safety, looking."""

from __future__ import annotations

import click

GROUPS = {
    "First of all": (
        *("--ranks", "--nodes", "--strategy", "--set", "--epochs", "--bitwise", "--run-dir"),
        *("--checkpoint-every", "--max-restarts", "--dry-run"),
    ),
    "What is trained": (
        *("--job", "--engine", "--steps", "--seed", "--eval-every", "--early-stop", "--patience"),
        *("--micro-batch", "--steps-per-call", "--loader-workers", "--prefetch"),
    ),
    "Where": (
        *("--slots", "--place", "--device", "--devices", "--threads", "--ranks-per-node"),
        *("--hosts", "--rendezvous", "--id", "--node-rank", "--interface", "--join-timeout"),
        *("--node-timeout", "--per-rank"),
    ),
    "Numbers": (
        *("--precision", "--loss-scale", "--channels-last", "--compile"),
        "--activation-checkpointing",
    ),
    "Safety": (
        *("--keep", "--best", "--resume", "--time-limit", "--hang-timeout", "--on-bad-step"),
        *("--spike", "--verify-every", "--witness", "--inject"),
    ),
    "Looking": ("--log", "--profile", "--placement", "--keep-runs", "--json", "--help"),
}


class GroupedCommand(click.Command):
    """A command whose options are shown in the groups above, and in their order."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {
            max(option.opts, key=len): row
            for option in self.get_params(ctx)
            if (row := option.get_help_record(ctx)) is not None
        }
        for title, names in GROUPS.items():
            shown = [rows[name] for name in names if name in rows]
            if shown:
                with formatter.section(title):
                    formatter.write_dl(shown)

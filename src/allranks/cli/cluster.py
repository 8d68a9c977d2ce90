"""`allranks cluster list|show|discover`: the computing sites that `allranks submit` knows."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from allranks.checkpoint.files import as_json
from allranks.cli.options import Verb
from allranks.errors import PlaceError, RequestError, printable
from allranks.launcher.slurm import commands
from allranks.launcher.slurm.commands import site_as_toml
from allranks.launcher.slurm.limits import slurm_time
from allranks.launcher.slurm.site import Partition, Site, bundled_names, bundled_text, load_site


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cluster() -> None:
    """The computing sites that submit knows: bundled, in your own files, and this machine's."""


@cluster.command("list")
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
def list_sites(as_object: bool) -> None:
    """List the sites that ship with allranks."""
    sites = [load_site(name) for name in bundled_names()]
    if as_object:
        click.echo(as_json([{"name": s.name, "partitions": list(s.partitions)} for s in sites]))
        return
    width = max(len(site.name) for site in sites)
    for site in sites:
        click.echo(f"{site.name:<{width}}  {site.title}: {', '.join(site.partitions)}")


@cluster.command("show")
@click.argument("name")
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
def show_site(name: str, as_object: bool) -> None:
    """Show the profile of the site NAME with its sources, or a FILE as submit reads it.

    \b
    allranks cluster show puhti
    allranks cluster show template > mysite.toml
    """
    site = load_site(name)
    if as_object:
        click.echo(as_json(dataclasses.asdict(site)))
    elif name.endswith(".toml"):
        click.echo(_table(site))
    else:
        click.echo(bundled_text(name), nl=False)


@cluster.command("discover", cls=Verb)
@click.option("--name", default="", help="Call the site so (default: as Slurm does).")
@click.option("--json", "as_object", is_flag=True, help="Print JSON.")
def discover(name: str, as_object: bool) -> None:
    """Ask this machine's Slurm what it has, and print it as a file for submit --cluster."""
    try:
        site = commands.discover()
    except PlaceError as error:
        raise RequestError(
            asked="allranks cluster discover",
            found=str(error),
            why="a site is described by its Slurm, which answers on its login nodes",
            do="type this on a login node, or start from a profile to fill in: "
            "allranks cluster show template > mysite.toml",
        ) from None
    if name:
        site = dataclasses.replace(site, name=name)
    click.echo(as_json(dataclasses.asdict(site)) if as_object else site_as_toml(site), nl=as_object)


def _table(site: Site) -> str:
    account = "an account is needed" if site.account_required else "no account is needed"
    lines = [f"{site.title}: {account}", ""]
    lines += [_row(partition) for partition in site.partitions.values()]
    return "\n".join(printable(line) for line in lines)


def _row(partition: Partition) -> str:
    """One line for a partition; what is not known is left out."""
    facts: list[tuple[Any, str]] = [
        (partition.max_nodes, "nodes at most"),
        (partition.cpus, "CPUs"),
        (partition.memory_mb, "MB"),
        (partition.gpus, "GPUs"),
    ]
    words = [f"{value} {unit}" for value, unit in facts if value is not None]
    if partition.time_limit_s is not None:
        words.append(f"at most {slurm_time(partition.time_limit_s)}")
    return f"{partition.name}: {', '.join(words)}"

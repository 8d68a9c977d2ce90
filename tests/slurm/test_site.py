"""The sites that ship with allranks: every number has its source; and files of one's own."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from allranks.errors import RequestError
from allranks.launcher.slurm.site import (
    Site,
    bundled_names,
    bundled_text,
    load_site,
    parse_seconds,
    parse_site,
)

NAMES = ["lumi", "mahti", "puhti", "roihu", "taurus-alpha", "taurus-gpu2", "taurus-ml", "template"]
SMALL = 'name = "x"\ntitle = "X"\n[partitions.a]\ncpus = 4\n'


def test_these_sites_ship_with_the_package() -> None:
    assert bundled_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_site_is_whole(name: str) -> None:
    site = load_site(name)
    assert site.name == name
    assert site.partitions
    assert bundled_text(name).isascii()
    for partition in site.partitions.values():
        assert partition.time_limit_s and partition.max_nodes and partition.cpus
        assert partition.gpus is not None
        share, most = partition.memory_share_mb, partition.memory_mb
        assert share is None or most is None or share <= most
        assert (partition.cores or 0) <= partition.cpus


@pytest.mark.parametrize("name", NAMES)
def test_every_number_says_where_and_when_it_was_read(name: str) -> None:
    site = load_site(name)
    used = set()
    for partition in site.partitions.values():
        assert all(getattr(partition, number) for number in partition.sources), "of no number"
        for number in partition.numbers():
            page = partition.sources.get(number, partition.source)
            source = site.sources[page]
            used.add(page)
            assert re.fullmatch(r"https://\S+", source.url), (partition.name, number)
            assert datetime.date.fromisoformat(source.as_of) > datetime.date(2020, 1, 1)
    assert used


def test_the_numbers_of_taurus() -> None:
    ml, gpu2 = load_site("taurus-ml").partition("ml"), load_site("taurus-gpu2").partition("gpu2")
    assert (ml.gpus, ml.cores, ml.cpus, ml.memory_mb) == (6, 44, 176, 254_000)
    assert (gpu2.gpus, gpu2.cpus, gpu2.memory_mb) == (4, 24, 62_000)


def test_a_site_with_one_partition_needs_no_name_of_it() -> None:
    assert load_site("taurus-ml").partition("").name == "ml"
    assert parse_site(SMALL, "x").partition("").cpus == 4


def test_an_unknown_partition_is_refused_with_those_there_are() -> None:
    with pytest.raises(RequestError) as refused:
        load_site("puhti").partition("gpus")
    assert refused.value.found == (
        "Puhti (CSC) has test, small, large, longrun, hugemem, gputest, gpu"
    )
    assert "did you mean 'gpu'?" in refused.value.do
    with pytest.raises(RequestError, match="none of them is the usual one"):
        load_site("puhti").partition("")


def test_an_unknown_site_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean 'puhti'"):
        load_site("puthi")
    with pytest.raises(RequestError, match=r"nothing\.toml"):
        load_site("nothing.toml")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(bundled_text("template"))
    site = load_site(str(tmp_path / "mine.toml"))
    template = load_site("template")
    assert site.partitions == template.partitions
    assert isinstance(site, Site) and site.file.endswith("mine.toml")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("name = ", "Invalid value"),
        ('title = "X"\n[partitions.a]', "no name"),
        ('name = "x"\ntitle = "X"', "no [partitions.NAME]"),
        (SMALL + "memory = 3", "memory = 3"),
        (SMALL + 'gpus = "4"', "gpus = '4'"),
        (SMALL + "gpus = true", "gpus = True"),
        (SMALL + "gpus = -1", "gpus = -1"),
        (SMALL + "max_nodes = 0", "max_nodes = 0"),
        (SMALL + 'time_limit = "soon"', "time_limit = 'soon'"),
        (SMALL + 'gpu_request = "--gres=gpu"', "gpu_request = '--gres=gpu'"),
        (SMALL + 'memory_flag = "ram"', "memory_flag = 'ram'"),
        (SMALL + 'source = "page"', "source 'page'"),
        (SMALL + "options = [1]", "options = [1]"),
        ('memory_flag = "ram"\n' + SMALL, "memory_flag = 'ram'"),
        ('default_partition = "b"\n' + SMALL, "default_partition = 'b'"),
        ('modules = "torch"\n' + SMALL, "modules = 'torch'"),
        ("partitions = 3\nname = 'x'\ntitle = 'X'", "partitions = 3"),
        (SMALL + '[sources.a]\nurl = "u"', "no as_of"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_its_line(text: str, found: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_site(text, "mine.toml")
    assert found in refused.value.found
    assert "mine.toml" in refused.value.asked


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("15m", 900),
        ("36:00:00", 129_600),
        ("1-12:00:00", 129_600),
        ("7d", 604_800),
        ("2-12", 216_000),
        ("90", 5400),
        ("1-12:30", 131_400),
        ("x", None),
        ("1-x", None),
    ],
)
def test_time_limits_as_slurm_writes_them(text: str, seconds: int | None) -> None:
    assert parse_seconds(text) == seconds

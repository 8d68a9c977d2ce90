"""The site of `make docs`: its navigation has every page, and its reference every docstring.

`make docs` itself finds links that lead nowhere; here is what needs no Sphinx.
"""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from typing import Any

import pytest

import allranks.torch
from allranks.job.job import GROUPS
from conftest import ROOT

REFERENCE = (ROOT / "docs" / "reference.md").read_text()
NAMES = re.findall(r"^\.\. auto(?:class|function):: (\S+)$", REFERENCE, re.M)


def test_every_page_is_in_the_navigation_of_one_reader() -> None:
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    readers = [conf["entries"](lines) for lines in conf["SECTIONS"].values()]
    pages = [p for reader in readers for first, below in reader.items() for p in (first, *below)]
    named = [ROOT / f"{page}.md" for page in pages]
    missing = {*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")} - {*named, ROOT / "README.md"}
    assert not missing, "add them to SECTIONS in docs/conf.py"
    assert len(set(named)) == len(named)
    assert all(path.is_file() for path in named)


def test_the_reference_has_what_a_user_imports() -> None:
    assert {f"allranks.torch.{name}" for name in allranks.torch.__all__} <= {*NAMES}
    assert {f"{group.__module__}.{group.__name__}" for group in GROUPS.values()} <= {*NAMES}
    assert {"allranks.launch", "allranks.check"} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_all_that_the_reference_names_has_a_docstring(name: str) -> None:
    """Sphinx leaves out methods without one, and says nothing."""
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    members = vars(thing).items() if inspect.isclass(thing) else ()
    silent = [key for key, member in members if is_silent(key, member)]
    assert thing.__doc__ and not silent, silent


def is_silent(name: str, member: Any) -> bool:
    """Whether it is a public method, or a property, without a docstring."""
    inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return inspect.isfunction(inner) and not name.startswith("_") and not inner.__doc__

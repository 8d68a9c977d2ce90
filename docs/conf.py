"""The site that `make docs` builds from README.md, docs/ and the docstrings, with Sphinx.

A page that SECTIONS does not name, a link that leads nowhere and anything that a page would load
from the network are errors. `tests/test_docs_site.py` looks at SECTIONS without Sphinx.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

SECTIONS = {
    "I have a script": "scripts checking words report benchmarking benchmarking_peers found",
    "I have a task": (
        "tour tasks task_losses task_models task_training own_loop notebooks data ready_made "
        "running precision checkpoints checkpoints_in_detail deepspeed_configuration tensorflow "
        "tensorflow_in_detail ../examples/README reference glossary"
    ),
    "Strategies": (
        "strategies strategies_data strategies_sharded strategies_layers strategies_pipelines "
        "strategies_memory cut_models parameter_servers parameter_servers_in_detail decoupled "
        "sending_less sending_less_loss compressed_gradients"
    ),
    "I run a cluster": (
        "clusters scripts_on_nodes collectives gpu gpu_in_detail when_it_fails failures_in_detail "
        "faults_on_purpose nothing_left_behind exit_codes security ../SECURITY"
    ),
    "Why it is right": (
        "correctness correctness_mechanisms correctness_checks correctness_limits "
        "../benchmarks/README ../benchmarks/LOG"
    ),
    "Change it": "../CONTRIBUTING ../tests/README ../CHANGELOG",
}
"""The navigation: the pages of each reader, in order. A new page of docs/ is one more word."""

project = "allranks"
copyright = "the authors of allranks, Apache-2.0"
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "examples/README.md", "benchmarks/*.md", "tests/README.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "allranks"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
pygments_style, pygments_dark_style = "friendly", "github-dark"
default_role = "literal"  # docstrings write `name`, as Markdown does
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
add_module_names = False
python_maximum_signature_line_length = 160

LOADED = re.compile(r"""<(?:link|script|img|iframe)[^>]*(?:src|href)=["'](?:https?:)?//[^"']+""")


def add_navigation(app: Any, name: str, source: list[str]) -> None:
    """Add the navigation to README.md, where GitHub would show it as text."""
    if name == root_doc:
        for title, pages in SECTIONS.items():
            paths = [f"docs/{page}".replace("docs/../", "") for page in pages.split()]
            tree = "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *paths, "```"])
            source[0] += f"\n{tree}\n"


def finish(app: Any, error: Exception | None) -> None:
    """Make README.html what a browser opens first, and refuse pages that need the network."""
    if error is None:
        site = Path(app.outdir)
        shutil.copy(site / f"{root_doc}.html", site / "index.html")
        for page in site.rglob("*.html"):
            for found in LOADED.findall(page.read_text()):
                logging.getLogger("sphinx.site").warning(
                    "%s would load %s from the network", page, found
                )


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
    app.connect("build-finished", finish)

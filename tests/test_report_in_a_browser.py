"""The page of `allranks report` in headless Chromium: desk and phone, light and dark, by pointer.

A page of ours holds the report in a frame of the asked width, looks into it with a script, and
leaves what it found in its own text, which `--dump-dom` prints.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.display.following import in_words
from allranks.tools.report.page import page_of
from allranks.tools.report.records import read_run
from report_runs import write_phases, write_run

HEIGHT = 2400
PROBE = """
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow;
  const root = page.documentElement;
  const plot = page.querySelector(".plot"), box = plot.getBoundingClientRect();
  const at = { clientX: box.left + box.width, clientY: box.top + 20, bubbles: true };
  plot.dispatchEvent(new view.PointerEvent("pointermove", at));
  const tip = page.getElementById("tip"), frameOfTip = tip.getBoundingClientRect();
  const said = tip.hidden ? "" : [...tip.querySelectorAll("span")].map((s) => s.textContent);
  const right = frameOfTip.right;
  plot.dispatchEvent(new view.KeyboardEvent("keydown", { key: "Home", bubbles: true }));
  const first = [...tip.querySelectorAll("span")].map((s) => s.textContent);
  const wide = [...page.querySelectorAll("main *")].filter((e) =>
    !e.closest(".scroll, pre, svg, .hidden")
      && e.getBoundingClientRect().right > root.clientWidth + 1);
  const found = {
    width: root.scrollWidth, client: root.clientWidth, said, first, right,
    wide: wide.map((e) => e.className || e.tagName),
    paper: view.getComputedStyle(root).backgroundColor,
    ink: view.getComputedStyle(page.body).color,
    plots: page.querySelectorAll(".plot svg").length,
    unnamed: [...page.querySelectorAll('[role="img"], [role="region"]')].filter(
      (e) => !e.getAttribute("aria-label")).length,
  };
  document.getElementById("found").textContent = JSON.stringify(found);
};
"""


def look(tmp_path: Path, page: str, width: int, dark: bool) -> dict[str, Any]:
    """What the probe finds in the page, shown in this width; fails if the console says anything."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is missing")
    frame = (
        f'<iframe style="border:0;width:{width}px;height:{HEIGHT}px" srcdoc="{html.escape(page)}">'
    )
    outer = tmp_path / "outer.html"
    outer.write_text(
        f"<!doctype html><meta charset=utf-8><link rel=icon href=data:,>{frame}</iframe>"
        f"<pre id=found></pre><script>{PROBE}</script>"
    )
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=3000", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", f"--window-size=1400,{HEIGHT}"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    # Its shared memory may stay behind where it ends early: in a folder of its own, not /dev/shm.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        done = subprocess.run(
            [*command, "--disable-dev-shm-usage", outer.as_uri()],
            env=os.environ | {"TMPDIR": scratch},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    assert "CONSOLE" not in done.stderr, done.stderr
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    told: dict[str, Any] = json.loads(html.unescape(found))
    return told


def brightness(colour: str) -> float:
    """Of a colour as a browser tells it, from 0 to 255."""
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_page_in_a_browser(tmp_path: Path, width: int, dark: bool) -> None:
    run = write_run(tmp_path / "one", program="a_long_name_of_a_program/without_a_space.py:Task")
    write_phases(run)
    runs = [read_run(run, "one"), read_run(write_run(tmp_path / "two", strategy="zero1"), "two")]
    found = look(tmp_path, page_of(runs, in_words), width, dark)
    assert found["width"] == found["client"] > width - 20, "nothing is wider than the page"
    assert found["wide"] == []
    assert found["right"] <= width
    assert (brightness(found["paper"]) < 60) == dark == (brightness(found["ink"]) > 200)
    assert found["said"][:4] == ["step", "12", "A training", "0.5"], "under the pointer"
    assert found["first"][:4] == ["step", "1", "A training", "2"], "by the keyboard"
    assert found["plots"] == 3 and found["unnamed"] == 0

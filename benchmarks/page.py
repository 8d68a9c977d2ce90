"""Writes the tables of `README.md` from the newest record of each benchmark; nothing is typed in.

python benchmarks/page.py            between the two markers of the page
python benchmarks/page.py --check    say whether the page is what the records give; exit 1 if not
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
BEGIN = "<!-- the records begin here; written by page.py -->"
END = "<!-- the records end here -->"
MOST_LINES = 100
"""A record with more comparisons shows those that are held to something."""
BENCHMARKS = (
    "launch",
    "collectives",
    "two_processes",
    "backends",
    "step",
    "huggingface",
    "bitwise",
    "checkpoint",
    "restart",
    "share",
    "audit",
    "witness",
    "watched",
    "side-by-side",
    "strategies",
    "memory",
    "branches",
    "split-sweep",
    "input",
    "pipeline_bubble",
    "tensorflow",
    "slow_link",
    "quality",
    "parameter_server",
    "fuzz",
    "fuzz_peers",
)


def newest(name: str, folder: Path) -> tuple[str, dict[str, Any]] | None:
    """The file name and the content of the newest record of a benchmark, or `None`."""
    found = []
    for path in folder.glob(f"{name}-*.json"):
        record = json.loads(path.read_text())
        if record["benchmark"] == name:
            found.append((record["machine"]["date"], path.name, record))
    if not found:
        return None
    _, file, record = max(found, key=lambda each: each[:2])
    return file, record


def section(name: str, folder: Path) -> str:
    """One benchmark: where it ran, the comparisons, and the medians behind them."""
    found = newest(name, folder)
    if found is None:
        return f"### {name}\n\nNo record yet.\n"
    file, record = found
    lines = [f"### {name}", "", _where(file, record), ""]
    if "verdicts" in record:
        return "\n".join([*lines, *_verdicts(record), ""])
    lines += ["| what | measured | ratio or difference | interval | pairs | bar | met |"]
    compared = record["comparisons"]
    judged = [one for one in compared if one["bar"] is not None]
    is_long = len(compared) > MOST_LINES
    lines += ["|---|---|---|---|---|---|---|", *map(_comparison, judged if is_long else compared)]
    lines.append("")
    if is_long:
        lines += [f"Those with a bar, of {len(compared)}; the record has all, and the medians.", ""]
    tables = _tables([row for row in record.get("rows", []) if "what" in row])  # else ratios alone
    if tables and not is_long:
        lines += ["Medians (they say something only beside each other):", ""]
    for metrics, rows in () if is_long else tables:
        head = f"| what | contender | {' | '.join(metrics)} |"
        lines += [head, "|---|---|" + "---|" * len(metrics)]
        for row in rows:
            values = " | ".join(_number(row[metric]) for metric in metrics)
            lines.append(f"| {row['what']} | {row['contender']} | {values} |")
        lines.append("")
    return "\n".join(lines)


def _verdicts(record: dict[str, Any]) -> list[str]:
    """How many combinations were what, and by what they were equal."""
    counted = [f"{count:,} {what}" for what, count in record["verdicts"].items()]
    lines = [f"{', '.join(counted)}.", "", "| equal, by | how many |", "|---|---|"]
    for what, by in record["equal_by"].items():
        told = ", ".join(f"{name} {count:,}" for name, count in by.items())
        lines.append(f"| {what} | {told} |")
    return lines


def _tables(rows: list[dict[str, Any]]) -> list[tuple[list[str], list[dict[str, Any]]]]:
    """The rows with what they measure in common, in a table for each."""
    tables: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        metrics = tuple(key for key in row if key not in ("what", "contender"))
        tables.setdefault(metrics, []).append(row)
    return [(list(metrics), rows) for metrics, rows in tables.items()]


def _where(file: str, record: dict[str, Any]) -> str:
    m = record["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in m["packages"].items() if version)
    text = (
        f"[{file}](records/{file}): {m['date'][:10]}, {m['cpu']}, {m['cores']} cores, "
        f"{m['memory_gib']} GiB, Python {m['python']}, {packages}, commit {m['commit']}, "
        f"load {m['load_1min_at_start']} at the start."
    )
    if "ceiling" in record:
        ceiling = ", ".join(f"{key} {_number(value)}" for key, value in record["ceiling"].items())
        text += f" Ceiling: {ceiling}."
    return text


def _comparison(c: dict[str, Any]) -> str:
    i = c["interval"]
    digits, unit, beside = {
        "ratio": (3, "", f" / {c['over']}"),
        "difference_us": (0, " µs", f" − {c['over']}"),
        "value_s": (2, " s", ""),
        "value_us": (2, " µs", ""),
    }[c["kind"]]
    bar = "" if c["bar"] is None else f"≤ {c['bar']:g}{unit}"
    cells = (
        c["what"],
        f"{c['of']}{beside}, {c['metric']}",
        f"{i['median']:,.{digits}f}{unit}",
        f"{i['low']:,.{digits}f} … {i['high']:,.{digits}f} ({i['confidence']:.0%})",
        str(i["pairs"]),
        bar,
        c["met"] or "",
    )
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) < 0.1:
        return f"{value:.3f}"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"


def rendered(page: str, folder: Path) -> str:
    """The page with what the records give between its markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    tables = "\n".join(section(name, folder) for name in BENCHMARKS)
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--records", type=Path, default=HERE / "records")
    asked = parser.parse_args()
    page = PAGE.read_text()
    new = rendered(page, asked.records)
    if asked.check:
        sys.exit(0 if new == page else "README.md is not what the records give: run page.py")
    PAGE.write_text(new)


if __name__ == "__main__":
    main()

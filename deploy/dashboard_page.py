#!/usr/bin/env python3
"""Draws the dashboard's panels as a web page from a running Prometheus, where there is no Grafana.

    python3 deploy/dashboard_page.py http://127.0.0.1:9090 dashboard.html --minutes 5

Same panels, queries, titles and places as deploy/grafana/kvbm-dashboard.json; all instances. Needs nothing
but Python. Below 900 pixels the panels stand one below the other.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).resolve().parent / "grafana" / "kvbm-dashboard.json"
STEPS = 120
MIN_RATE_INTERVAL_S = 5
WIDTH, HEIGHT, LEFT = 460, 150, 62
COLORS = ("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0", "#508642")
STYLE = """
body{background:#111217;color:#d8d9da;font:13px sans-serif;margin:10px}
h2{font-size:15px;margin:12px 2px 4px}.row{display:grid;grid-template-columns:repeat(24,1fr);gap:6px}
.panel{background:#181b1f;border:1px solid #2c3235;padding:6px;min-width:0}.panel b{font-weight:600}
svg{width:100%;height:auto;display:block}.legend{font-size:11px;line-height:1.5;overflow-wrap:anywhere}
.none{color:#f2495c;height:120px;line-height:120px;text-align:center}
@media(max-width:900px){.panel{grid-column:span 24!important}}
"""
_UNITS = {"percentunit": (100.0, " %"), "s": (1.0, " s"), "Bps": (1.0, "B/s"), "short": (1.0, "")}


class Line(NamedTuple):
    """A series, as (seconds, value)."""

    name: str
    points: list[tuple[float, float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draw the KVBM dashboard from a Prometheus.")
    parser.add_argument("prometheus", help="its URL")
    parser.add_argument("page", type=Path, help="where to write the HTML page")
    parser.add_argument("--minutes", type=float, default=15.0, help="how far back")
    options = parser.parse_args(argv)
    try:
        options.page.write_text(draw(options.prometheus, options.minutes * 60), encoding="utf-8")
    except OSError as error:
        print(f"{options.prometheus}: {error}", file=sys.stderr)
        return 1
    return 0


def draw(url: str, seconds: float) -> str:
    """The page."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    parts, is_open = [], False
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            end = "</div>" if is_open else ""
            parts.append(f"{end}<h2>{html.escape(panel['title'])}</h2><div class='row'>")
            is_open = True
            continue
        lines = [line for target in panel["targets"] for line in _ask(url, target, seconds)]
        span = f"style='grid-column:span {panel['gridPos']['w']}'"
        unit = panel["fieldConfig"]["defaults"].get("unit", "short")
        title = html.escape(panel["title"])
        parts.append(f"<div class='panel' {span}><b>{title}</b>{_plot(lines, unit, seconds)}</div>")
    title = html.escape(dashboard["title"])
    head = f"<meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</div></body></html>"


def _ask(url: str, target: dict[str, Any], seconds: float) -> list[Line]:
    now_s, step_s = time.time(), max(1.0, seconds / STEPS)
    interval_s = max(MIN_RATE_INTERVAL_S, round(4 * step_s))
    text = target["expr"].replace("$__rate_interval", f"{interval_s}s").replace("$instance", ".*")
    query = {"query": text, "start": now_s - seconds, "end": now_s, "step": step_s}
    asked = f"{url}/api/v1/query_range?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(asked, timeout=30) as answer:  # noqa: S310 - the user's own Prometheus
        found = json.load(answer)["data"]["result"]
    lines = []
    for one in found:
        name = target["legendFormat"]
        for label, value in one["metric"].items():
            name = name.replace(f"{{{{{label}}}}}", value)
        points = [(at_s - now_s + seconds, float(value)) for at_s, value in one["values"]]
        lines.append(Line(name, [point for point in points if not math.isnan(point[1])]))
    return lines


def _plot(lines: list[Line], unit: str, seconds: float) -> str:
    if not any(line.points for line in lines):
        return "<div class='none'>No data</div>"
    highest = max(value for line in lines for _, value in line.points)
    top = 1.0 if unit == "percentunit" else highest * 1.1 or 1.0
    shapes = []
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT - 8 - share * (HEIGHT - 20)
        shapes.append(f"<line x1='{LEFT}' x2='{WIDTH}' y1='{y}' y2='{y}' stroke='#2c3235'/>")
        text = f"<text x='{LEFT - 5}' y='{y + 4}' text-anchor='end' font-size='11' fill='#9aa0a6'>"
        shapes.append(f"{text}{_number(share * top, unit)}</text>")
    for number, line in enumerate(lines):
        points = " ".join(
            f"{LEFT + at_s / seconds * (WIDTH - LEFT):.1f},{HEIGHT - 8 - value / top * (HEIGHT - 20):.1f}"
            for at_s, value in line.points
        )
        color = COLORS[number % len(COLORS)]
        shapes.append(f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='1.6'/>")
    legend = " &nbsp; ".join(
        f"<span style='color:{COLORS[number % len(COLORS)]}'>&#9632;</span> {html.escape(line.name)} "
        f"{_number(line.points[-1][1], unit) if line.points else ''}"
        for number, line in enumerate(lines)
    )
    plot = f"<svg viewBox='0 0 {WIDTH} {HEIGHT}'>{''.join(shapes)}</svg>"
    return f"{plot}<div class='legend'>{legend}</div>"


def _number(value: float, unit: str) -> str:
    factor, name = _UNITS.get(unit, (1.0, ""))
    value *= factor
    if unit == "percentunit":
        return f"{value:.0f}{name}"
    if unit == "s" and value < 1.0:
        return f"{value * 1000:.3g} ms" if value else "0 s"
    for prefix in ("", "k", "M"):
        if abs(value) < 1000:
            return f"{value:.3g} {prefix}{name}".strip()
        value /= 1000
    return f"{value:.3g} G{name}"


if __name__ == "__main__":
    sys.exit(main())

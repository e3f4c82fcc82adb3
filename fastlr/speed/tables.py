"""A record, or two of them, as text; readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fastlr.report.record import threads
from fastlr.speed.compare import Pair, compare, differences
from fastlr.speed.kernels import SECTION
from fastlr.speed.record import Record

BAD = ("wrong", "error")


def seconds(value: float | None) -> str:
    """A time with its unit.

    Examples:
        >>> seconds(0.0812), seconds(1.234), seconds(3.1e-5), seconds(None)
        ('81.2 ms', '1.23 s', '31 us', '-')
    """
    if value is None:
        return "-"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def size(value: float | None) -> str:
    """A number of bytes with its unit.

    Examples:
        >>> size(1.5e9), size(2e6), size(None)
        ('1.5 GB', '2 MB', '-')
    """
    if value is None:
        return "-"
    for factor, unit in ((1e-9, "GB"), (1e-6, "MB"), (1e-3, "kB")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.0f} B"


def header(record: Record) -> list[Text]:
    """Where and what, and the two ceilings."""
    e, s = record.environment, record.settings
    place = e.get("gpu") or f"CPU run: {e['cpu']}, {threads(e['threads'])}"
    commit = (e.get("commit") or "no commit")[:10] + (", changed" if e.get("dirty") else "")
    lines = [
        Text(f"fastlr bench on {place}", style="bold"),
        Text(f"torch {e['versions'].get('torch')}, {commit}, {e['date']}"),
    ]
    if not e.get("gpu"):
        lines.append(Text("No kernel ran: ops are plain torch's. Figures for a GPU need one.", style="yellow"))
    copy, product = record.ceilings.get("copy"), record.ceilings.get("matmul")
    if copy and product:
        rates = f"copy {copy['bytes_per_second'] / 1e9:.4g} GB/s, product {product['operations_per_second'] / 1e12:.3g} TFLOP/s"
        lines.append(Text(f"measured ceilings: {rates} ({product['dtype']})"))
    shrunk = f", sides divided by {s['shrink']}" if s["shrink"] > 1 else ""
    return [*lines, Text(f"images {s['size']}x{s['size']}, kernels on {s['dtype']}, batch {s['batch']}{shrunk}")]


def whole_table(name: str, rows: Iterable[dict[str, Any]]) -> RenderableType:
    """Estimates, stages and plain passes of one network."""
    rows = list(rows)
    timed = next((r for r in rows if "seconds" in r), None)
    title = name if timed is None else f"{name}: {timed['n']} images, {timed['precision']}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", max_width=36)
    for column in ("time", "p20..p80", "floor", "/plain", "peak"):
        table.add_column(column, justify="right", no_wrap=True)
    errors = []
    for row in rows:
        if row["status"] in BAD or "seconds" not in row:
            table.add_row(Text(row["name"]), Text(row["status"].upper()), "", "", "", "", style="red")
            errors.append(Text(f"{row['name']}: {row.get('error', row['status'])}", style="red"))
            continue
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else "-"
        floor, peak = seconds(row.get("floor_seconds")), size(row.get("peak_bytes"))
        cells = (seconds(row["seconds"]), _spread(row), floor, ratio, peak)
        table.add_row(Text(row["name"]), *cells, style="bold" if "default" in row["name"] else None)
    parts: list[RenderableType] = [table, *errors]
    if timed is not None and "against" in timed:
        parts.append(Text(f"/plain: to the fastest plain forward and backward pass ({timed['against']})", style="dim"))
    return Group(*parts, Text())


def kernel_table(rows: Iterable[dict[str, Any]], device: str) -> RenderableType:
    """Ops on their cases: time, rate, share of a copy's, deviation."""
    gpu = device.startswith("cuda")
    title = "kernels" if gpu else "ops (plain torch)"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", max_width=38)
    for column in ("time", "GB/s", "of copy", "off by", ""):
        table.add_column(column, justify="right", no_wrap=True)
    errors, last, fallbacks = [], None, False
    for row in rows:
        if row.get("op") != last:
            last = row.get("op")
            table.add_row(Text(str(last), style="bold"))
        case = f"  {row.get('case', row['name'])}"
        if row["status"] in BAD or "seconds" not in row:
            off = f"{row['deviation']:.0e}" if row.get("deviation") is not None else ""
            style = "red" if row["status"] in BAD else "dim"
            table.add_row(Text(case), Text(row["status"].upper()), "", "", off, "", style=style)
            if row["status"] in BAD:
                errors.append(Text(f"{row['name']}: {row.get('error')}", style="red"))
            continue
        fallbacks |= row["status"] == "not covered"
        mark = "*" if row["status"] == "not covered" else "low" if row.get("meets_target") is False else ""
        rate = f"{row['bytes_per_second'] / 1e9:.4g}"
        cells = (seconds(row["seconds"]), rate, f"{100 * row['share']:.0f} %", f"{row['deviation']:.0e}", mark)
        table.add_row(Text(case), *cells)
    notes = [Text("GB/s: bytes that must be read and written, over the time; off by: of float64", style="dim")]
    if gpu:
        notes.append(Text("low: a norm kernel below 70 % of the copy's rate, images below 80 %", style="dim"))
    if fallbacks:
        notes.append(Text("*: no kernel for this case; plain torch", style="dim"))
    return Group(table, *errors, *notes, Text())


def training_table(name: str, rows: Iterable[dict[str, Any]]) -> RenderableType:
    """Training images a second by mode."""
    rows = list(rows)
    timed = next((r for r in rows if "seconds" in r), None)
    title = (
        name if timed is None else f"{name}: {timed['n']} images {timed['size']}x{timed['size']}, {timed['precision']}"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", max_width=24)
    base = "" if timed is None else f"/{timed.get('against', '')}"
    for column in ("time", "p20..p80", "images/s", base):
        table.add_column(column, justify="right", no_wrap=True)
    errors = []
    for row in rows:
        if row["status"] in BAD:
            errors.append(Text(f"{row['name']}: {row.get('error', row['status'])}", style="red"))
        if "seconds" in row:
            ratio = f"{row['ratio']:.2f}" if "ratio" in row else "-"
            cells = (seconds(row["seconds"]), _spread(row), f"{row['images_per_second']:,.0f}", ratio)
            table.add_row(Text(row["name"]), *cells)
    return Group(Text(title, style="bold"), table, *errors, Text())


def _spread(row: dict[str, Any]) -> str:
    low, high = row["seconds_p20"], row["seconds_p80"]
    return f"{100 * (low / row['seconds'] - 1):+.0f}..{100 * (high / row['seconds'] - 1):+.0f} %"


def training_report(record: Record) -> RenderableType:
    """A record of training steps alone."""
    e = record.environment
    place = e.get("gpu") or f"{e['cpu']}, {threads(e['threads'])}"
    return Group(Text(f"training on {place}", style="bold"), Text(), *_tables(record), *_end(record))


def check_table(record: Record) -> RenderableType:
    """Checks and targets."""
    table = Table(
        title="checks", title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("", max_width=56)
    for column in ("found", "limit", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for check in record.checks:
        word = "ok" if check["ok"] else "missed" if check["target"] else "WRONG"
        style = None if check["ok"] else "yellow" if check["target"] else "red"
        numbers = f"{check['value']:.1e}", f"{check['limit']:.0e}"
        table.add_row(Text(f"{check['section']}: {check['name']}"), *numbers, word, style=style)
    return Group(table, Text())


def report(record: Record) -> RenderableType:
    """The whole record."""
    return Group(*header(record), Text(), *_tables(record), *_end(record))


def _tables(record: Record) -> list[RenderableType]:
    parts: list[RenderableType] = []
    sections: dict[str, list[dict[str, Any]]] = {}
    for row in record.rows:
        sections.setdefault(row["section"], []).append(row)
    for name, rows in sections.items():
        if name == SECTION:
            order = {op: i for i, op in enumerate(dict.fromkeys(r.get("op") for r in rows))}
            parts.append(kernel_table(sorted(rows, key=lambda r: order[r.get("op")]), record.settings["device"]))
        elif any("images_per_second" in row for row in rows):
            parts.append(training_table(name, rows))
        elif any("kind" in row or row["status"] in BAD for row in rows):
            parts.append(whole_table(name, [r for r in rows if "kind" in r or r["status"] in BAD]))
    return parts


def _end(record: Record) -> list[RenderableType]:
    parts: list[RenderableType] = [check_table(record)] if record.checks else []
    parts += [Text(f"dropped for lack of time: {name}", style="yellow") for name in record.dropped]
    parts += [Text(f"note: {note}") for note in record.notes]
    failures = record.failures
    parts += [Text(f"FAILED {failure}", style="bold red") for failure in failures]
    if not failures:
        missed = f"; {len(record.missed)} targets missed" if record.missed else ""
        parts.append(Text(f"nothing failed{missed}", style="bold"))
    return parts


def comparison(a: Record, b: Record, names: tuple[str, str] = ("A", "B")) -> RenderableType:
    """Ratios of two records; slower and faster are beyond the spread of both."""
    pairs = compare(a, b)
    parts: list[RenderableType] = [Text(f"A: {names[0]}  ({_place(a)})"), Text(f"B: {names[1]}  ({_place(b)})"), Text()]
    parts += [Text(f"not the same: {text}", style="yellow") for text in differences(a, b)]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", max_width=44)
    for column in ("A", "B", "B/A", ""):
        table.add_column(column, justify="right", no_wrap=True)
    styles = {"slower": "red", "faster": "green", "wrong": "bold red", "error": "bold red"}
    last = None
    for pair in pairs:
        if pair.section != last:
            last = pair.section
            table.add_row(Text(last, style="bold"))
        times = [seconds(row.get("seconds")) if row else "-" for row in (pair.a, pair.b)]
        ratio = f"{pair.ratio:.2f}" if pair.ratio is not None else "-"
        word = "" if pair.verdict == "same" else pair.verdict
        table.add_row(Text(f"  {pair.name}"), *times, ratio, word, style=styles.get(pair.verdict))
    return Group(*parts, table, Text(), _count(pairs))


def _count(pairs: list[Pair]) -> Text:
    words = [p.verdict for p in pairs]
    text = f"{words.count('slower')} slower, {words.count('faster')} faster, {words.count('same')} within the spread"
    return Text(f"{text} (20 % quantile of one above the 80 % quantile of the other)", style="bold")


def _place(record: Record) -> str:
    e = record.environment
    return f"{e.get('gpu') or e.get('cpu')}, {(e.get('commit') or e.get('sources') or '?')[:10]}, {e.get('date')}"

"""Tables, lines and JSON of ``kvbm remote``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from kvbm_core.cli.report import age_text, ages_as_json, ages_table, date_text, shown, unix_s
from kvbm_core.cli.status import format_bytes
from kvbm_core.layout.heads import FP8
from kvbm_core.storage.disk.inspect import Contents
from kvbm_core.storage.inspection import Checked, Counted, Model, Shard
from kvbm_core.storage.remote.sweep import SweepLimits, Swept

_COLUMNS = ("records", "blocks", "codec", "size", "last used", "least recently")


def models_table(where: str, shards: Sequence[Shard], now_ns: int) -> Table:
    """One row per model, and a sum if there are several."""
    table = Table("model", title=Text(f"blocks below {shown(where)}"))
    for column in ("folders", *_COLUMNS):
        table.add_column(column, justify="right", no_wrap=True)
    models = by_namespace(shards)
    for number, (namespace, own) in enumerate(models.items(), 1):
        name = Text(namespace, overflow="fold")
        is_last = number == len(models) > 1
        table.add_row(name, str(len(own)), *_cells(own, now_ns), end_section=is_last)
    if len(models) > 1:
        table.add_row("all", "", *_cells(shards, now_ns))
    return table


def shards_table(where: str, shards: Sequence[Shard], now_ns: int) -> Table:
    """One row per rank's folder."""
    table = Table("folder", title=Text(f"ranks below {shown(where)}"))
    for name in (*_COLUMNS, "half written"):
        table.add_column(name, justify="right", no_wrap=True)
    for shard in shards:
        folder = Text(f"{shard.namespace}/{shard.name}", overflow="fold")
        table.add_row(folder, *_cells([shard], now_ns), f"{shard.temporary:,}")
    return table


def uses_table(shards: Sequence[Shard]) -> Table:
    """How hot: records by their last use, as bars."""
    rows = [
        (Text(namespace, overflow="fold"), _contents(own)) for namespace, own in by_namespace(shards).items()
    ]
    return ages_table("records by last use", "model", rows)


def by_namespace(shards: Sequence[Shard]) -> dict[str, list[Shard]]:
    """The ranks of each model."""
    models: dict[str, list[Shard]] = {}
    for shard in shards:
        models.setdefault(shard.namespace, []).append(shard)
    return models


def _contents(shards: Sequence[Shard]) -> Contents:
    return Contents.sum_of(shard.contents for shard in shards)


def _cells(shards: Sequence[Shard], now_ns: int) -> tuple[str, ...]:
    contents = _contents(shards)
    blocks = _num_blocks(shards)
    return (
        f"{contents.used:,}",
        "?" if blocks is None else f"{blocks:,}",
        "; ".join(sorted({shard.codec for shard in shards} - {""})),
        format_bytes(sum(shard.num_bytes for shard in shards)),
        age_text(contents.newest_ns, now_ns),
        age_text(contents.oldest_ns, now_ns),
    )


def _num_blocks(shards: Sequence[Shard]) -> int | None:
    """None if names do not tell: those that were made with a secret."""
    if any(shard.untold for shard in shards):
        return None
    return sum(shard.num_blocks for shard in shards)


def notes(counted: Counted, where: str) -> Iterator[str]:
    """One line for what is strange, and for who evicts."""
    for shard in counted.shards:
        if shard.strange:
            yield strange_note(f"{shard.namespace}/{shard.name}", shard.strange)
    for namespace, model in counted.models.items():
        if model.strange:
            yield strange_note(namespace, model.strange)
        if model.evictor:
            yield f"{namespace}: last evicted by {shown(model.evictor)}"
    if counted.strange:
        yield strange_note(shown(where), counted.strange)


def strange_note(folder: str, count: int) -> str:
    """On files and folders in ``folder`` that are none of kvbm's."""
    what = f"{count:,} names are" if count > 1 else "1 name is"
    return f"{folder}: {what} not kvbm's and left alone"


def lossy_line(shards: Sequence[Shard]) -> str:
    """What checksums do not say; empty if there is nothing to say."""
    lossy = sum(shard.contents.used for shard in shards if shard.codec.partition(",")[0] == FP8)
    what = "numbers in float8, not what engines computed"
    return f"{lossy:,} records are kept with the codec fp8: {what}" if lossy else ""


def unreadable_notes(shards: Sequence[Shard]) -> Iterator[str]:
    """One line for each rank's folder of which a part cannot be read."""
    for shard in shards:
        if shard.unreadable:
            what = f"folders or files that cannot be read: {shard.unreadable:,}"
            yield f"{shard.namespace}/{shard.name}: {what}; run this as the engine's user"


def sweep_line(where: str, limits: SweepLimits, swept: Swept, *, is_dry: bool) -> str:
    """What was found and done, in one line."""
    limit = f"limit {format_bytes(limits.max_bytes)}"
    line = f"{shown(where)}: {swept.records:,} records, {format_bytes(swept.num_bytes)}, {limit}"
    if not swept.removed and not swept.trouble and swept.num_bytes <= limits.max_bytes:
        return f"{line}: nothing to remove"
    done = "would be removed" if is_dry else "removed"
    line += f": {swept.removed:,} records, {format_bytes(swept.removed_bytes)} {done}"
    if swept.oldest_s is not None:
        line += f", the first last used {date_text(int(swept.oldest_s * 1e9))}"
    line += f"; {format_bytes(swept.left_bytes)} {'would be left' if is_dry else 'are left'}"
    if swept.trouble:
        return f"{line}; {swept.trouble}; run it again"
    if swept.left_bytes > limits.max_bytes:
        line += f", the rest was used within the last {limits.grace_s:.0f} s"
        line += f" or was beyond {limits.candidates:,} records" if is_dry else ""
    return line


def swept_as_json(url: str, limits: SweepLimits, swept: Swept, *, is_dry: bool) -> dict[str, object]:
    """The keys are part of the interface: see docs/remote.md."""
    return {
        "url": url,
        "evicts_itself": False,
        "max_bytes": limits.max_bytes,
        "dry_run": is_dry,
        "records": swept.records,
        "bytes": swept.num_bytes,
        "removed": swept.removed,
        "removed_bytes": swept.removed_bytes,
        "left_bytes": swept.left_bytes,
        "trouble": swept.trouble or None,
    }


def verified_as_json(
    url: str, good: int, foreign: Sequence[Checked], bad: Sequence[Checked], *, removed: bool
) -> dict[str, object]:
    """The keys are part of the interface: see docs/remote.md."""
    return {
        "url": url,
        "good": good,
        "foreign": dict(Counter(checked.what for checked in foreign)),
        "removed": sum(not checked.is_unreadable for checked in bad) if removed else 0,
        "bad": [
            {"name": checked.name, "what": checked.what, "unreadable": checked.is_unreadable}
            for checked in bad
        ],
    }


def as_json(url: str, counted: Counted) -> dict[str, object]:
    """The keys are part of the interface: see docs/remote.md."""
    models = by_namespace(counted.shards)
    return {
        "url": url,
        "strange": counted.strange,
        "namespaces": {name: _model_as_json(own, counted.models[name]) for name, own in models.items()},
    }


def _model_as_json(shards: Sequence[Shard], model: Model) -> dict[str, object]:
    contents = _contents(shards)
    return {
        "records": contents.used,
        "blocks": _num_blocks(shards),
        "bytes": sum(shard.num_bytes for shard in shards),
        "last_used_unix_s": unix_s(contents.newest_ns),
        "least_recently_used_unix_s": unix_s(contents.oldest_ns),
        "evictor": model.evictor or None,
        "strange": model.strange,
        "shards": [
            {
                "name": shard.name,
                "records": shard.contents.used,
                "blocks": _num_blocks([shard]),
                "codec": shard.codec or None,
                "bytes": shard.num_bytes,
                "half_written": shard.temporary,
                "strange": shard.strange,
                "unreadable": shard.unreadable,
                "records_by_last_use": ages_as_json(shard.contents),
            }
            for shard in shards
        ],
    }

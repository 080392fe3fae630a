"""Tables, lines and JSON of ``kvbm remote``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvbm_core.cli.report import age_text, ages_as_json, ages_table, shown, unix_s
from kvbm_core.cli.status import format_bytes
from kvbm_core.storage.directory.inspect import Model, Shard
from kvbm_core.storage.disk.inspect import Contents


def namespaces_table(directory: Path, shards: Sequence[Shard], now_ns: int) -> Table:
    """One row per model, and a sum if there are several."""
    table = Table("model", title=Text(f"blocks below {shown(directory)}"))
    for column in ("folders", "blocks", "size", "last used", "least recently"):
        table.add_column(column, justify="right", no_wrap=True)
    models = by_namespace(shards)
    for number, (namespace, own) in enumerate(models.items(), 1):
        name = Text(namespace, overflow="fold")
        is_last = number == len(models) > 1
        table.add_row(name, str(len(own)), *_cells(own, now_ns), end_section=is_last)
    if len(models) > 1:
        table.add_row("all", "", *_cells(shards, now_ns))
    return table


def shards_table(directory: Path, shards: Sequence[Shard], now_ns: int) -> Table:
    """One row per rank's folder."""
    table = Table("folder", title=Text(f"ranks below {shown(directory)}"))
    for name in ("blocks", "size", "last used", "least recently", "half written"):
        table.add_column(name, justify="right", no_wrap=True)
    for shard in shards:
        folder = Text(f"{shard.namespace}/{shard.name}", overflow="fold")
        table.add_row(folder, *_cells([shard], now_ns), f"{shard.temporary:,}")
    return table


def uses_table(shards: Sequence[Shard]) -> Table:
    """How hot: blocks by their last use, as bars."""
    rows = [
        (Text(namespace, overflow="fold"), _contents(own)) for namespace, own in by_namespace(shards).items()
    ]
    return ages_table("blocks by last use", "model", rows)


def by_namespace(shards: Sequence[Shard]) -> dict[str, list[Shard]]:
    """The ranks of each model."""
    models: dict[str, list[Shard]] = {}
    for shard in shards:
        models.setdefault(shard.namespace, []).append(shard)
    return models


def _contents(shards: Sequence[Shard]) -> Contents:
    return Contents.sum_of(shard.contents for shard in shards)


def _cells(shards: Sequence[Shard], now_ns: int) -> tuple[str, str, str, str]:
    contents = _contents(shards)
    return (
        f"{contents.used:,}",
        format_bytes(sum(shard.num_bytes for shard in shards)),
        age_text(contents.newest_ns, now_ns),
        age_text(contents.oldest_ns, now_ns),
    )


def notes(shards: Sequence[Shard], models: Mapping[str, Model]) -> Iterator[str]:
    """One line for what is strange, and for who evicts."""
    for shard in shards:
        if shard.strange:
            yield strange_note(f"{shard.namespace}/{shard.name}", shard.strange)
    for namespace, model in models.items():
        if model.strange:
            yield strange_note(namespace, model.strange)
        if model.evictor:
            yield f"{namespace}: last evicted by {shown(model.evictor)}"


def strange_note(folder: str, count: int) -> str:
    """On files and folders in ``folder`` that are none of kvbm's."""
    what = f"{count:,} names are" if count > 1 else "1 name is"
    return f"{folder}: {what} not kvbm's and left alone"


def unreadable_notes(shards: Sequence[Shard]) -> Iterator[str]:
    """One line for each rank's folder of which a part cannot be read."""
    for shard in shards:
        if shard.unreadable:
            what = f"folders or files that cannot be read: {shard.unreadable:,}"
            yield f"{shard.namespace}/{shard.name}: {what}; run this as the engine's user"


def as_json(directory: Path, shards: Sequence[Shard], models: Mapping[str, Model]) -> dict[str, object]:
    """The keys are part of the interface: see docs/remote.md."""
    return {
        "directory": str(directory),
        "namespaces": {name: _model_as_json(own, models[name]) for name, own in by_namespace(shards).items()},
    }


def _model_as_json(shards: Sequence[Shard], model: Model) -> dict[str, object]:
    contents = _contents(shards)
    return {
        "blocks": contents.used,
        "bytes": sum(shard.num_bytes for shard in shards),
        "last_used_unix_s": unix_s(contents.newest_ns),
        "least_recently_used_unix_s": unix_s(contents.oldest_ns),
        "evictor": model.evictor or None,
        "strange": model.strange,
        "shards": [
            {
                "name": shard.name,
                "blocks": shard.contents.used,
                "bytes": shard.num_bytes,
                "half_written": shard.temporary,
                "strange": shard.strange,
                "unreadable": shard.unreadable,
                "blocks_by_last_use": ages_as_json(shard.contents),
            }
            for shard in shards
        ],
    }

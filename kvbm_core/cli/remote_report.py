"""Tables, lines and JSON of ``kvbm remote``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvbm_core.cli.disk_report import AGE_NAMES, age_text, bar, date_text, shown
from kvbm_core.cli.status import format_bytes
from kvbm_core.storage.directory.look import Checked, Shard
from kvbm_core.storage.disk.verify import MAX_DETAILS


def by_namespace(shards: Sequence[Shard]) -> dict[str, Shard]:
    """The ranks of each model added up; ``name`` is how many there are."""
    sums: dict[str, Shard] = {}
    for shard in shards:
        total = sums.setdefault(shard.namespace, Shard(shard.namespace, "0"))
        total.name = str(int(total.name) + 1)
        _add(total, shard)
    return sums


def _add(total: Shard, shard: Shard) -> None:
    total.num_bytes += shard.num_bytes
    total.temporary += shard.temporary
    total.strange += shard.strange
    total.unreadable += shard.unreadable
    ours, theirs = total.contents, shard.contents
    ours.used += theirs.used
    ours.ages = [sum(pair) for pair in zip(ours.ages, theirs.ages, strict=True)]
    ours.oldest_ns = min(filter(None, (ours.oldest_ns, theirs.oldest_ns)), default=None)
    ours.newest_ns = max(filter(None, (ours.newest_ns, theirs.newest_ns)), default=None)


def namespaces_table(directory: Path, sums: Mapping[str, Shard], now_ns: int) -> Table:
    """One row per model, and a sum if there are several."""
    table = Table("model", title=Text(f"blocks below {shown(directory)}"))
    for name in ("folders", "blocks", "size", "last used", "least recently"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (namespace, total) in enumerate(sums.items(), 1):
        table.add_row(
            Text(namespace, overflow="fold"),
            total.name,
            *_cells(total, now_ns),
            end_section=number == len(sums) > 1,
        )
    if len(sums) > 1:
        everything = Shard("all", "")
        for total in sums.values():
            _add(everything, total)
        table.add_row("all", "", *_cells(everything, now_ns))
    return table


def shards_table(directory: Path, shards: Sequence[Shard], now_ns: int) -> Table:
    """One row per rank's folder."""
    table = Table("folder", title=Text(f"ranks below {shown(directory)}"))
    for name in ("blocks", "size", "last used", "least recently", "half written"):
        table.add_column(name, justify="right", no_wrap=True)
    for shard in shards:
        folder = Text(f"{shard.namespace}/{shard.name}", overflow="fold")
        table.add_row(folder, *_cells(shard, now_ns), f"{shard.temporary:,}")
    return table


def uses_table(sums: Mapping[str, Shard]) -> Table:
    """How hot: blocks by their last use, as bars."""
    table = Table("model", *AGE_NAMES, "since (UTC)", title="blocks by last use")
    for namespace, total in sums.items():
        if total.blocks:
            bars = [f"{bar(share / total.blocks)} {share:,}" for share in total.contents.ages]
            table.add_row(Text(namespace, overflow="fold"), *bars, date_text(total.contents.oldest_ns))
    return table


def _cells(shard: Shard, now_ns: int) -> tuple[str, str, str, str]:
    contents = shard.contents
    return (
        f"{shard.blocks:,}",
        format_bytes(shard.num_bytes),
        age_text(contents.newest_ns, now_ns),
        age_text(contents.oldest_ns, now_ns),
    )


def notes(shards: Sequence[Shard], sweepers: Mapping[str, str]) -> Iterator[str]:
    """One line for what is strange, and for who sweeps."""
    for shard in shards:
        name = f"{shard.namespace}/{shard.name}"
        if shard.strange:
            yield f"{name}: {shard.strange:,} names are none of kvbm's; they are left alone"
        if shard.unreadable:
            what = f"{shard.unreadable:,} folders or files cannot be read"
            yield f"{name}: {what}; run this as the engine's user"
    for namespace, who in sweepers.items():
        if who:
            yield f"{namespace}: last swept by {shown(who)}"


def damage_lines(directory: Path, bad: Sequence[Checked]) -> Iterator[str]:
    """The first bad files, one line each, and how many more there are."""
    for checked in bad[:MAX_DETAILS]:
        word = "unreadable" if checked.is_unreadable else "damaged"
        yield f"{word}: {shown(checked.path.relative_to(directory))}: {checked.what}"
    if len(bad) > MAX_DETAILS:
        yield f"and {len(bad) - MAX_DETAILS:,} more"


def as_json(directory: Path, shards: Sequence[Shard], sweepers: Mapping[str, str]) -> dict[str, object]:
    """The keys are part of the interface: see docs/remote.md."""
    return {
        "directory": str(directory),
        "namespaces": {
            namespace: {
                "blocks": total.blocks,
                "bytes": total.num_bytes,
                "last_used_unix_s": _seconds(total.contents.newest_ns),
                "least_recently_used_unix_s": _seconds(total.contents.oldest_ns),
                "swept_by": sweepers.get(namespace) or None,
                "shards": [_shard_as_json(shard) for shard in shards if shard.namespace == namespace],
            }
            for namespace, total in by_namespace(shards).items()
        },
    }


def _shard_as_json(shard: Shard) -> dict[str, object]:
    names = (name.replace(" ", "_") for name in AGE_NAMES)
    return {
        "name": shard.name,
        "blocks": shard.blocks,
        "bytes": shard.num_bytes,
        "half_written": shard.temporary,
        "strange": shard.strange,
        "unreadable": shard.unreadable,
        "blocks_by_last_use": dict(zip(names, shard.contents.ages, strict=True)),
    }


def _seconds(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 1e9

"""Shared stores: writes, reads and removes a small object, or a file, in each."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbm_core.cli.doctor.check import Check, Finding, Subject, error, ok, warning
from kvbm_core.config import KvbmSettings
from kvbm_core.config.remote_url import remote_directory, scheme_of
from kvbm_core.config.server_url import MOONCAKE_SCHEME, VALKEY_SCHEMES, server_url
from kvbm_core.errors import Outcome
from kvbm_core.runtime.assembly import store_options
from kvbm_core.storage.directory.calls import FileCalls
from kvbm_core.storage.directory.names import TOP
from kvbm_core.storage.directory.size import SHARE, SIZE, read_size, size_text
from kvbm_core.storage.remote.engine import GetItem, ObjectEngine, PutItem
from kvbm_core.storage.stores import open_engine

CONTENT = b"kvbm doctor"
CONNECT_S = 3.0
DEADLINE_S = 45.0
_RANK = "{worker_id}"
_REASONS = {
    Outcome.MISS: "there is no such bucket, or no such place in it",
    Outcome.TIMED_OUT: "no answer in time",
    Outcome.NO_SPACE: "it is full",
    Outcome.IO_ERROR: "it cannot be reached, or refuses",
    Outcome.REJECTED: "it refuses",
}


def look_at_stores(subject: Subject) -> Iterator[Finding]:
    """Each store of KVBM_REMOTE_URL."""
    for url in subject.settings.store_urls:
        scheme = scheme_of(url)
        if scheme in ("", "file"):
            yield from _look_at_directory(subject.settings, url)
        elif scheme == MOONCAKE_SCHEME:
            yield _look_at_master(url)
        else:
            yield from _look_at_engine(subject.settings, url.replace(_RANK, "0"))


def _look_at_directory(settings: KvbmSettings, url: str) -> Iterator[Finding]:
    path = remote_directory(url)
    try:
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            yield error(f"{path} is no directory", "mount the shared directory, or correct KVBM_REMOTE_URL")
            return
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(CONTENT)
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError:
        yield error(f"{path} is not there", "mount or make it: kvbm makes no shared directory")
    except OSError as problem:
        remedy = "give the engine's user the right to write there, and make room"
        yield error(f"{path}: {problem.strerror}", remedy)
    else:
        yield ok(f"{path} can be written")
        yield from _look_at_sizes(settings, path)
        others = stat.S_IWOTH if settings.remote_trust == "group" else stat.S_IWGRP | stat.S_IWOTH
        if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
            seen = f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):o})"
            yield warning(seen, f"chmod go-w {path}, or share it with a group (docs/remote.md)")


def _look_at_sizes(settings: KvbmSettings, path: Path) -> Iterator[Finding]:
    """How large each model's folder may grow."""
    if settings.remote_cache_gb is not None:
        yield ok(f"each model may have {size_text(settings.remote_max_bytes)} there (KVBM_REMOTE_CACHE_GB)")
        return
    for file in sorted((path / TOP).glob(f"*/{SIZE}")):
        try:
            read_size(file, FileCalls())
        except ValueError as problem:
            yield warning(str(problem), "remove it: an engine makes another; or set KVBM_REMOTE_CACHE_GB")
    status = os.statvfs(path)
    free = size_text(int(status.f_bavail * status.f_frsize * SHARE))
    yield ok(f"a new model may have half of what is free: {free} now")


def _look_at_master(url: str) -> Finding:
    server = server_url(url)
    try:
        socket.create_connection((server.host, server.port), CONNECT_S).close()
    except OSError as problem:
        remedy = "start mooncake_master there, or correct KVBM_REMOTE_URL and the firewall"
        return error(f"{url}: {problem.strerror or problem}", remedy)
    return ok(f"{url}: the master's port is open; nothing was stored")


def _look_at_engine(settings: KvbmSettings, url: str) -> Iterator[Finding]:
    deadline_s = settings.remote_deadline_s
    with _log_lines() as lines:
        engine = open_engine(url, store_options(settings))
        try:
            step, outcome = _use(engine, deadline_s)
        finally:
            engine.close()
    if outcome is not Outcome.OK:
        said = next((line for line in reversed(lines) if _place(url) in line), "").partition("; it is left")[
            0
        ]
        reason = said.partition(" fail: ")[2] or said.partition(" refuses: ")[2]
        reason = reason or said.rpartition(f"{_place(url)}: ")[2] or _REASONS.get(outcome, str(outcome))
        reason, _, own = reason.partition("; run ")  # the line of a package's store says what to do
        remedy = f"run {own}" if own else _remedy(f"{reason} {outcome}", step)
        yield error(f"{url}: {step}: {reason}", remedy)
        return
    yield ok(f"{url} takes, gives and removes objects")
    if scheme_of(url) in VALKEY_SCHEMES:
        limit = next((line for line in lines if "maxmemory" in line), "")
        if limit:
            seen, _, remedy = limit.rpartition("; ")
            yield warning(seen.removeprefix("kvbm: "), remedy)


def _use(engine: ObjectEngine, deadline_s: float) -> tuple[str, Outcome]:
    """What failed, and how; or all of it, and OK."""
    name = f"kvbm-doctor/{secrets.token_hex(16)}"
    memory = memoryview(bytearray(len(CONTENT)))
    (outcome,) = engine.put([PutItem(name, [memoryview(CONTENT)])], deadline_s=deadline_s)
    if outcome is not Outcome.OK:
        return "cannot write", outcome
    (got,) = engine.get([GetItem(name, [memory])], deadline_s=deadline_s)
    (removed,) = engine.remove([name], deadline_s=deadline_s)
    if got.outcome is not Outcome.OK or bytes(memory) != CONTENT:
        return "cannot read", got.outcome if got.outcome is not Outcome.OK else Outcome.CORRUPT
    return "cannot remove", removed


def _place(url: str) -> str:
    """How log lines call it."""
    return server_url(url).address if scheme_of(url) in VALKEY_SCHEMES else url


def _remedy(reason: str, step: str) -> str:
    text = reason.lower()
    if any(word in text for word in ("noauth", "wrongpass", "authentication")):
        return "set KVBM_REMOTE_PASSWORD_FILE, and KVBM_REMOTE_USERNAME if the server has users"
    if any(
        word in text for word in ("denied", "403", "401", "noperm", "signature", "accesskey", "forbidden")
    ):
        return "correct the credentials, or the rights: docs/remote.md lists those that are needed"
    if "bucket" in text or "not found" in text or "404" in text:
        return "make the bucket, or correct its name and AWS_ENDPOINT_URL_S3"
    if step == "cannot remove":
        return "allow removing too: docs/remote.md lists the rights that are needed"
    return "look whether the server runs and can be reached: its address, the firewall, TLS"


@contextmanager
def _log_lines() -> Iterator[list[str]]:
    """What kvbm logs meanwhile: why an outcome is not OK is said there alone."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, collector = logging.getLogger("kvbm"), Collector()
    logger.addHandler(collector)
    try:
        yield lines
    finally:
        logger.removeHandler(collector)


CHECKS = (
    Check(
        "stores",
        "each store of KVBM_REMOTE_URL: writes, reads and removes an object",
        look_at_stores,
        DEADLINE_S,
    ),
)

"""Stores that engines share, each of them in a test's own folder: as settings for engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.engines.mooncake_pool import MooncakePool
from tests.engines.object_servers import BUCKET, SeaweedServer
from tests.engines.valkey_server import ValkeyServer

URL = "KVBM_REMOTE_URL"


@contextmanager
def directory(folder: Path) -> Iterator[dict[str, str]]:
    """It is gone afterwards, and engines find nothing."""
    share = folder / "share"
    share.mkdir()
    yield {URL: f"file://{share}"}
    share.rename(folder / "gone")


@contextmanager
def bucket(folder: Path) -> Iterator[dict[str, str]]:
    """SeaweedFS's. What is asked twice goes there."""
    with SeaweedServer(folder / "server") as server:
        server.make_bucket()
        yield {URL: f"s3://{BUCKET}/e2e", **server.client_environment}


@contextmanager
def valkey(folder: Path) -> Iterator[dict[str, str]]:
    """With a password."""
    with ValkeyServer(folder) as server:
        yield {URL: server.url, "KVBM_REMOTE_PASSWORD_FILE": server.login().password_file}


@contextmanager
def mooncake(folder: Path) -> Iterator[dict[str, str]]:
    """One machine's memory."""
    with MooncakePool(folder, segment_bytes=1 << 30) as pool:
        yield {URL: f"mooncake://{pool.address}"}

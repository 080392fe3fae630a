"""What stands around a leader works without the engine's steps."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from kvbm_core.blocks.slot_tier import protect_nothing
from kvbm_core.config import KvbmSettings
from kvbm_core.observe.labels import PeerTrouble
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.assembly import LeaderProcess
from kvbm_core.runtime.endpoint import Endpoint
from kvbm_core.runtime.handshake import RankReplaced
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.messages import Borrow, GiveBack, Lent, PeerNews, Returned
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.types import BlockKey

LONG_S = 120.0


def test_the_hit_rates_are_logged_while_the_engine_has_nothing_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_told = threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "KVBM [engine-7] Cache Hit Rates - Host: 75.0% (3/4)" in record.getMessage():
                is_told.set()

    logger, handler = logging.getLogger("kvbm"), Told()
    caplog.set_level(logging.INFO, "kvbm")
    logger.addHandler(handler)
    settings = KvbmSettings.from_env({"cpu_cache_gb": 0.001, "cache_stats_log_interval_s": 0.01})
    path, metrics = tmp_path / "socket", Metrics()
    process = LeaderProcess(
        settings,
        metrics,
        Endpoint(f"ipc://{path}", path, secret=b"s"),
        world_size=1,
        model="model",
        engine_name="engine-7",
    )
    try:
        metrics.request_hits(3, 0, 4)
        assert is_told.wait(LONG_S)
    finally:
        process.close()
        logger.removeHandler(handler)


def test_what_ranks_ask_for_peers_is_answered_until_one_of_them_is_replaced(tmp_path: Path) -> None:
    """By a process whose memory is empty: the books are of the old one until the leader has heard of it."""
    settings = KvbmSettings.from_env({"cpu_cache_gb": 0.001, "peers": "zmq"})
    path, metrics = tmp_path / "socket", Metrics()
    process = LeaderProcess(
        settings,
        metrics,
        Endpoint(f"ipc://{path}", path, secret=b"s"),
        world_size=1,
        model="model",
        engine_name="engine",
    )
    try:
        leader = process.make_leader((GroupSpec(0, 16, None),), LeaderOptions())
        key, host = BlockKey(bytes(32)), leader.chain.host
        host.grow(1)
        host.commit(host.reserve([key], protect_nothing))
        ask, handshake = process._handshake.on_peers, process._handshake
        assert ask(Borrow(0, 1, [key], 1.0, is_find=True)) == Lent(1, (0,), (-1,), "", is_refused=False)
        assert ask(Borrow(0, 2, [key], 1.0, is_find=False)) == Lent(2, (0,), (-1,), "", is_refused=False)
        assert host.live_leases == 1
        assert ask(GiveBack(0, 2)) == Returned(2, was_held=True) and not host.live_leases
        assert ask(PeerNews(0, 1, 2, 3)) is None
        counts = [metrics.snapshot()[f'kvbm_peer_unserved_total{{reason="{name}"}}'] for name in PeerTrouble]
        assert counts == [1, 2, 3, 0]
        handshake.inbox.append(RankReplaced(0, 1))
        refused = ask(Borrow(0, 3, [key], 1.0, is_find=False))
        assert isinstance(refused, Lent) and refused.is_refused and refused.slots == (-1,)
    finally:
        process.close()

"""Records on an engine in memory below the host under vLLM's own scheduler: every byte is checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.testing import memory_engine
from kvbm_core.testing.memory_engine import EXISTS, GET
from tests.vllm.kvbm_engine import KvbmEngine
from tests.vllm.test_scheduler_disk import ALL, ask_anew, keys_of

FROM_STORE = "kvbm_onboard_blocks_o2d"
STORE = "memory://blocks?seed=1"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "secret": {"remote_secret_file": True},
    "encrypted": {"remote_secret_file": True, "remote_encrypt": True},
    "zstd": {"remote_codec": "zstd"},
    "all": {"remote_secret_file": True, "remote_encrypt": True, "remote_codec": "zstd"},
}
FAULTS = {
    "flips": "flips=0.2",
    "cut off": "truncates=0.2",
    "too long": "extends=0.2",
    "swapped": "swaps=0.2",
    "always there": "claims=1",
    "all": "latency_ms=1&fails=0.02&loses=0.1&flips=0.1&truncates=0.1&extends=0.1&swaps=0.1&is_late=0.02",
}


@pytest.fixture(autouse=True)
def _empty_stores() -> Iterator[None]:
    memory_engine.forget_all()
    yield
    memory_engine.forget_all()


def settings_of(way: str, folder: Path, secret: str = "a secret of an engine") -> dict[str, Any]:
    """With the name of a file that holds it."""
    made = dict(WAYS[way])
    if made.get("remote_secret_file"):
        path = folder / secret.replace(" ", "-")
        path.write_text(secret)
        made["remote_secret_file"] = str(path)
    return made


@pytest.mark.shows("KVBM_REMOTE_SECRET_FILE", "KVBM_REMOTE_CODEC=none")
@pytest.mark.parametrize(("way", "ranks"), [*((way, 1) for way in WAYS), ("all", 2)])
def test_another_engine_finds_what_the_first_one_stored(way: str, ranks: int, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"host_blocks": 60, "store": STORE, "ranks": ranks}
    settings = settings_of(way, tmp_path)
    with KvbmEngine(tmp_path, **shape, extra=settings) as engine:
        engine.add("a", ALL, 8)
        engine.step()
        keys = keys_of(engine, "a")
        engine.run()
        first = engine.record.outputs["a"]
        engine.settle()
    objects = memory_engine.OPENED[0].objects.objects
    named = [key for key in keys if any(key.hex() in name for name in objects)]
    held = [key for key in keys if any(key in content for content, _ in objects.values())]
    assert bool(named) == bool(held) == ("remote_secret_file" not in settings)
    with KvbmEngine(tmp_path, **shape, extra=settings) as engine:
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 49 // engine.spec.block_size_tokens * 4
        assert engine.metric(FROM_STORE) > 0
        engine.assert_clean()


@pytest.mark.shows("KVBM_REMOTE_SECRET_FILE")
@pytest.mark.parametrize("way", ["secret", "encrypted"])
def test_an_engine_with_another_secret_finds_nothing_and_spoils_nothing(way: str, tmp_path: Path) -> None:
    answers, found = [], []
    for secret in ("the secret of one", "another one's secret", "the secret of one"):
        extra = settings_of(way, tmp_path, secret)
        with KvbmEngine(tmp_path, host_blocks=60, store=STORE, extra=extra) as engine:
            answers.append(engine.ask("a", ALL, 8))
            engine.settle()
            found.append(engine.metric(FROM_STORE) > 0)
            engine.assert_clean()
    assert found == [False, False, True] and answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
def test_what_an_engine_of_objects_does_wrong_costs_hits_and_nothing_else(
    faults: str, tmp_path: Path, seed: int
) -> None:
    """Each of two ranks has faults of its own."""
    store = f"memory://blocks?seed={seed}&{faults}"
    shape = {"host_blocks": 30, "disk_blocks": 40, "store": store, "ranks": 2}
    # Longer than a busy machine makes a store wait, which is left alone after its deadline.
    with KvbmEngine(tmp_path, **shape, extra={"remote_wait_s": 10.0}) as engine:
        ask_anew(engine)
        asked = [call for opened in memory_engine.OPENED for call, _ in opened.calls]
        assert EXISTS in asked and (GET in asked or faults == FAULTS["all"]), "one that fails is left alone"
        engine.assert_clean()


def test_encryption_without_its_secret_is_one_line_and_the_engine_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"remote_encrypt": True, "remote_secret_file": str(tmp_path / "absent")}
    with KvbmEngine(tmp_path, host_blocks=60, store=STORE, extra=extra) as engine:
        first = engine.ask("a", ALL, 8)
        engine.forget_device()
        assert engine.ask("b", ALL, 8) == first
        engine.settle()
    told = [line for line in caplog.messages if "KVBM_REMOTE_SECRET_FILE" in line]
    assert len(told) == 1 and "No such file or directory" in told[0]
    assert not memory_engine.OPENED[0].objects.objects

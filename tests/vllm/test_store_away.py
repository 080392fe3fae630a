"""A store that is away for a minute, below an engine that goes on: it serves meanwhile, and uses the store
again afterwards, without a restart.

Always the minute passes on the clocks of kvbm alone; at night it passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from kvbm_core.clock import SystemClock
from kvbm_core.storage.remote.s3 import OFF_S
from kvbm_core.tiers.breaker import FIRST_PAUSE_S
from tests.engines.faulty_store import Fault, FaultyStore, faulty_store
from tests.engines.object_servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, SeaweedServer
from tests.engines.valkey_server import ValkeyServer
from tests.vllm.kvbm_engine import KvbmEngine

AWAY_S = 60.0
STEP_S = 5.0
SOON_S = 2 * AWAY_S
"""The breaker's pauses are 5, 10, 20 and 40 s, so that the last one ends within that."""
PROMPT = range(50)
WHOLE_TOKENS = 48


class Store(NamedTuple):
    """``keeps``: what was in it is there again. ``back_s``: it is used again within that, at most."""

    url: str
    go: Callable[[], None]
    come_back: Callable[[], None]
    keeps: bool = True
    back_s: float = SOON_S


def keys_of(url: str) -> dict[str, str]:
    """The environment of a client of S3."""
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": REGION}
    return {"AWS_ENDPOINT_URL_S3": url, **keys}


@contextmanager
def server_of_objects(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Nobody listens at its port."""
    with ExitStack() as stack:
        now: list[FaultyStore] = [stack.enter_context(faulty_store())]
        port = int(now[0].url.rpartition(":")[2])
        for name, value in keys_of(now[0].url).items():
            patch.setenv(name, value)

        def come_back() -> None:
            server = stack.enter_context(faulty_store(port=port))
            server.objects.update(now[0].objects)

        yield Store(f"s3://{BUCKET}/away", now[0].close, come_back)


@contextmanager
def only_the_bucket(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A server without a bucket is left alone for longer: somebody has to make one."""
    with faulty_store() as server:
        for name, value in keys_of(server.url).items():
            patch.setenv(name, value)

        def is_there(fault: Fault) -> Callable[[], None]:
            return lambda: setattr(server, "fault", fault)

        gone, there = is_there(Fault.NO_BUCKET), is_there(Fault.NONE)
        yield Store(f"s3://{BUCKET}/away", gone, there, back_s=OFF_S + SOON_S)


@contextmanager
def seaweed(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Killed, and started anew with its files."""
    with SeaweedServer(folder / "server") as server:
        server.make_bucket()
        for name, value in server.client_environment.items():
            patch.setenv(name, value)
        yield Store(f"s3://{BUCKET}/away", server.stop, server.start)


@contextmanager
def valkey(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Empty when it is back."""
    with ValkeyServer(folder) as server:
        patch.setenv("KVBM_REMOTE_PASSWORD_FILE", server.login().password_file or "")
        yield Store(server.url, server.stop, server.start, keeps=False)


@contextmanager
def directory(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Nothing is mounted there."""
    share, elsewhere = folder / "share", folder / "elsewhere"
    share.mkdir()
    yield Store(
        f"file://{share}", lambda: share.rename(elsewhere) and None, lambda: elsewhere.rename(share) and None
    )


class Asking:
    """Asks an engine, each time with an empty device and host."""

    def __init__(self, engine: KvbmEngine) -> None:
        self.engine = engine
        self._answers: dict[range, list[int]] = {}
        self._numbers = count()

    def again(self, prompt: range = PROMPT) -> int:
        """How many tokens came from the store. The answer is what it always was."""
        name = f"asked {next(self._numbers)}"
        answer = self.engine.ask(name, prompt, 8)
        assert answer == self._answers.setdefault(prompt, answer)
        self.engine.settle()
        assert self.engine.reset_device(with_connector=True)
        return self.engine.external_tokens(name)


def play(
    make: Callable[..., AbstractContextManager[Store]],
    folder: Path,
    patch: pytest.MonkeyPatch,
    pass_time: Callable[[float], None],
) -> float:
    """A store that is there, is away, and is back. How many seconds after that it was used again."""
    extra = {"remote_filter": "all", "remote_load": "always", "remote_deadline_s": 10.0}
    with (
        make(folder, patch) as store,
        KvbmEngine(folder, host_blocks=60, store=store.url, extra=extra) as engine,
    ):
        asking, clock = Asking(engine), SystemClock()
        assert (asking.again(), asking.again()) == (0, WHOLE_TOKENS)
        store.go()
        ends_at_s = clock.now_s() + AWAY_S
        while clock.now_s() < ends_at_s:
            assert asking.again() == 0
            pass_time(STEP_S)
        store.come_back()
        back_at_s, news = clock.now_s(), count(100, 100)
        if store.keeps:  # what was in it before is found
            while asking.again() != WHOLE_TOKENS:
                assert clock.now_s() < back_at_s + store.back_s, "it is not read again"
                pass_time(STEP_S)
        for start in news:  # what is new is kept
            new = range(start, start + 50)
            if (asking.again(new), asking.again(new)) == (0, WHOLE_TOKENS):
                break
            assert clock.now_s() < back_at_s + store.back_s, "it is not written to again"
            pass_time(STEP_S)
        took_s = clock.now_s() - back_at_s
        engine.assert_clean()
        return took_s


@pytest.mark.parametrize(
    "make",
    [server_of_objects, only_the_bucket, directory, pytest.param(valkey, marks=pytest.mark.valkey)],
    ids=lambda make: make.__name__,
)
def test_a_store_that_was_away_for_a_minute_is_used_again(
    make: Callable[..., AbstractContextManager[Store]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal ahead_s
        ahead_s += seconds

    monkeypatch.setattr(SystemClock, "now_s", lambda self: time.monotonic() + ahead_s)
    play(make, tmp_path, monkeypatch, pass_time)


@pytest.mark.nightly("two minutes for each store; always the minute passes on kvbm's clocks alone")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "make", [seaweed, pytest.param(valkey, marks=pytest.mark.valkey)], ids=lambda make: make.__name__
)
def test_a_server_that_was_away_for_a_minute_is_used_again(
    make: Callable[..., AbstractContextManager[Store]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tell: Callable[[str], None],
) -> None:
    took_s = play(make, tmp_path, monkeypatch, lambda _: None)
    tell(f"used again {took_s:.0f} s after it was back; the first pause is {FIRST_PAUSE_S:.0f} s")

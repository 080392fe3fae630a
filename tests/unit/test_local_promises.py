"""What LocalTiers promises: what is claimed is held, and what has expired is not trusted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.runtime.local import Claim
from tests.unit.local_bench import KEYS, End, LocalBench

TTL_S = 30.0
MINE, OTHERS = KEYS[:3], KEYS[6:9]


class Bench(LocalBench):
    """Three slots of host memory, which hold MINE; time when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        super().__init__(folder, 3, clock=self.clock)
        assert self.store(MINE) is Outcome.OK
        assert self.tiers.match("r", MINE) == 3

    def pass_time(self, seconds: float) -> None:
        """Somebody else asks for something after so long."""
        self.clock.advance(seconds)
        assert self.tiers.match("somebody", KEYS[9:]) == 0

    def assert_held(self, claim: Claim | None) -> None:
        """Each block is in its slot, nothing takes it away, and it can be loaded."""
        assert claim is not None and tuple(claim.keys) == tuple(MINE)
        assert self.store(OTHERS) is Outcome.NO_SPACE
        end = End()
        self.tiers.load(claim, self.blocks_for(MINE), end)
        assert end.wait() is Outcome.OK and self.came(MINE)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_of_an_expired_promise_the_blocks_are_held_anew(bench: Bench) -> None:
    bench.pass_time(TTL_S + 1)
    assert not bench.tiers._promises and not bench.tiers._chain.live_leases
    bench.assert_held(bench.tiers.claim("r", MINE))


def test_leases_that_have_ended_behind_a_promise_are_not_trusted(bench: Bench) -> None:
    """The tier has ended what is over; the promise has not been looked at since."""
    bench.clock.advance(TTL_S + 1)
    with bench.tiers._lock:
        bench.tiers._chain.mind([])
    assert bench.tiers._promises and not bench.tiers._chain.live_leases
    assert bench.store(OTHERS) is Outcome.OK  # in the very slots
    assert bench.tiers.claim("r", MINE) is None
    assert not bench.tiers._promises and not bench.tiers._chain.live_leases


def test_a_promise_of_blocks_that_were_forgotten_since_is_not_trusted(bench: Bench) -> None:
    with bench.tiers._lock:
        bench.tiers._chain.host.forget(MINE[1:2])  # a load of it failed
    assert bench.tiers.claim("r", MINE) is None
    assert not bench.tiers._chain.live_leases and bench.tiers.resident_blocks == (2,)


def test_a_promise_in_time_is_the_claim_and_outlives_its_time(bench: Bench) -> None:
    bench.pass_time(TTL_S - 1)
    claim = bench.tiers.claim("r", MINE)
    for _ in range(10):
        bench.pass_time(TTL_S / 2)
    bench.assert_held(claim)
    assert not bench.tiers._chain.live_leases


def test_a_promise_ends_when_its_time_is_over_and_not_before(bench: Bench) -> None:
    bench.pass_time(TTL_S - 0.5)
    assert list(bench.tiers._promises) == ["r"] and bench.tiers._chain.live_leases == 1
    bench.pass_time(0.5)
    assert not bench.tiers._promises and not bench.tiers._chain.live_leases
    assert bench.store(OTHERS) is Outcome.OK

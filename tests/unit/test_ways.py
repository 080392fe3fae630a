"""The ways of a block do not grow unnoticed: see tests/ways.py."""

from __future__ import annotations

from tests.ways import rows

MOST_OWN_CALLS = {
    "host to disk": 125,
    "disk to host to device": 260,
    "store to host": 1150,
    "linker from disk": 300,  # its ends may be taken in by any thread
}
"""In the thread of the engine."""


def test_no_way_is_longer_than_it_was() -> None:
    """Who makes one longer with reason says so here; who makes one shorter lowers its number."""
    own_calls = {row.way: row.own_calls for row in rows()}
    assert own_calls.keys() == MOST_OWN_CALLS.keys()
    assert {way: calls for way, calls in own_calls.items() if calls > MOST_OWN_CALLS[way]} == {}

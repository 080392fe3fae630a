"""What a request of vLLM or TensorRT-LLM can be: the tables, what they promise, the pages that show them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.errors import IntegrityError
from kvbm_core.runtime.request import after
from kvbm_trtllm.requests import Followed, Requests
from kvbm_trtllm.states import LOAD_TABLE, REQUEST_TABLE, LoadStatus, RequestEvent, RequestStatus
from kvbm_vllm.requests import TABLE, Event, Status

DOCS = Path(__file__).resolve().parents[2] / "docs"
BROKEN = {RequestStatus.BROKEN, RequestStatus.REFUSED}
TABLES = [(REQUEST_TABLE, RequestStatus.WAITING), (LOAD_TABLE, LoadStatus.NONE), (TABLE, Status.NEW)]


def as_text(table: Mapping[Any, Mapping[Any, Any]]) -> str:
    """In Markdown: a row for each state, a column for each event."""
    events = list(dict.fromkeys(event for row in table.values() for event in row))
    lines = ["| | " + " | ".join(event.value for event in events) + " |", "| --- |" + " --- |" * len(events)]
    for status, row in table.items():
        cells = [f"*{row[event].value}*" if event in row else " " for event in events]
        lines.append(f"| *{status.value}* | " + " | ".join(cells) + " |")
    return "\n".join(" ".join(line.split()) for line in lines) + "\n"


@pytest.mark.parametrize("table", [table for table, _ in TABLES])
def test_a_page_shows_the_table(table: Mapping[Any, Mapping[Any, Any]]) -> None:
    page = DOCS / ("architecture.md" if table is TABLE else "trtllm-inside.md")
    assert as_text(table) in page.read_text(encoding="utf-8"), f"{page.name} lacks\n{as_text(table)}"


@pytest.mark.parametrize(("table", "start"), TABLES)
def test_every_state_can_be_reached_and_left(table: Mapping[Any, Mapping[Any, Any]], start: Enum) -> None:
    assert set(table) == set(type(start))
    reached, new = {start}, {start}
    while new:
        new = {to for status in new for to in table[status].values()} - reached
        reached |= new
    assert reached == set(table)
    stays = {status for status, row in table.items() if not set(row.values()) - {status}}
    assert stays <= {Status.UNCACHED}, "a state with no way out but the end"


@pytest.mark.parametrize(("table", "start"), TABLES)
def test_what_is_not_in_the_table_is_a_bug(table: Mapping[Any, Mapping[Any, Any]], start: Enum) -> None:
    events = {event for row in table.values() for event in row}
    impossible = [(status, event) for status in table for event in events if event not in table[status]]
    assert impossible
    for status, event in impossible:
        with pytest.raises(IntegrityError, match=event.value):
            after(table, status, event)


def test_a_request_of_two_weights_is_matched_only_if_it_is_asked_for_anew() -> None:
    for status in set(Status) - {Status.UNCACHED}:
        assert after(TABLE, status, Event.CHANGED) in {Status.MIXED, Status.LOADING_MIXED}
    assert set(TABLE[Status.LOADING_MIXED].values()) <= {Status.MIXED, Status.LOADING_MIXED}
    assert {event for event, to in TABLE[Status.MIXED].items() if to is not Status.MIXED} == {Event.ANEW}


def test_a_request_whose_blocks_are_wrong_runs_only_if_it_is_asked_for_anew() -> None:
    for status in RequestStatus:
        assert after(REQUEST_TABLE, status, RequestEvent.FAILED) in BROKEN
    for status in BROKEN:
        assert set(REQUEST_TABLE[status].values()) <= BROKEN


def test_who_is_broken_is_known_at_every_moment(rng: random.Random) -> None:
    requests = Requests()
    for _ in range(2000):
        number = rng.randrange(5)
        followed = requests.get(number)
        if followed is None or rng.random() < 0.1:
            requests.add(Followed(number, None, [], 0))  # asked for, or asked for anew
        elif rng.random() < 0.1:
            requests.forget(number)
        else:
            before, event = followed.status, rng.choice(list(RequestEvent))
            if event in REQUEST_TABLE[before]:
                requests.move(followed, event)
            else:
                with pytest.raises(IntegrityError):
                    requests.move(followed, event)
                assert followed.status is before
        known = [found for n in range(5) if (found := requests.get(n)) is not None]
        assert requests.broken == {found.number for found in known if found.status in BROKEN}


def test_only_what_will_come_back_is_never_silent() -> None:
    requests = Requests()
    for number, status in enumerate(RequestStatus):
        requests.add(Followed(number, None, [], 0, status=status))
    requests.silent(now_s=0.0)  # all have just been heard of
    silent = {found.status for found in requests.silent(now_s=1000.0)}
    assert silent == set(RequestStatus) - {RequestStatus.LOADING, RequestStatus.BROKEN}

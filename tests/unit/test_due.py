"""When a request is looked at: in the step in which a block is full, and in its answer run by run."""

from __future__ import annotations

import pytest

from kvbm_core.runtime.due import DueRequests
from kvbm_core.tiers.groups import GroupSpec

BLOCK = 16
FULL = (GroupSpec(0, BLOCK),)
WINDOW = (GroupSpec(0, BLOCK), GroupSpec(1, BLOCK, window_tokens=64))


def steps_until_due(due: DueRequests[str], request: str = "a") -> int:
    """How many steps of one token each pass before ``request`` is due."""
    for step in range(1, 1000):
        if request in due.next_step({request: 1}, 1):
            return step
    raise AssertionError("never due")


def look(due: DueRequests[str], computed: int, num_scheduled: int, prompt: int, request: str = "a") -> None:
    """As after a step; the next block is full at the next whole one."""
    known = computed + num_scheduled
    due.look_when_full(
        request,
        (known // BLOCK + 1) * BLOCK,
        computed_tokens=computed,
        num_scheduled=num_scheduled,
        num_prompt_tokens=prompt,
    )


@pytest.mark.parametrize(("groups", "run_tokens"), [(FULL, 0), (FULL, BLOCK), (WINDOW, 256)])
def test_without_runs_each_block_is_due_in_its_step(groups: tuple[GroupSpec, ...], run_tokens: int) -> None:
    due = DueRequests[str](groups, run_tokens)
    look(due, computed=40, num_scheduled=1, prompt=20)
    assert steps_until_due(due) == 48 - 41


def test_a_prompt_that_is_not_through_is_not_held_back() -> None:
    due = DueRequests[str](FULL, 256)
    look(due, computed=0, num_scheduled=40, prompt=100)
    assert steps_until_due(due) == 8


@pytest.mark.parametrize(
    ("groups", "run_tokens", "wait_tokens"),
    [
        (FULL, 128, 112),
        (FULL, BLOCK, 0),
        (FULL, 0, 0),
        ((GroupSpec(0, 256),), 128, 0),
        ((GroupSpec(0, BLOCK), GroupSpec(1, 2 * BLOCK)), 128, 96),
        (WINDOW, 128, 0),
    ],
)
def test_how_long_a_decoding_request_is_left_alone(
    groups: tuple[GroupSpec, ...], run_tokens: int, wait_tokens: int
) -> None:
    due = DueRequests[str](groups, run_tokens, stride=1)
    look(due, computed=100, num_scheduled=1, prompt=20)
    assert steps_until_due(due) == 112 - 101 + wait_tokens


def test_requests_that_begin_together_do_not_store_together() -> None:
    due = DueRequests[str](FULL, 256, stride=1)
    names = [str(number) for number in range(64)]
    for name in names:
        look(due, computed=0, num_scheduled=32, prompt=32, request=name)
    steps: dict[str, int] = {}
    for step in range(1, 300):
        steps |= dict.fromkeys(due.next_step(dict.fromkeys(names, 1), len(names)), step)
    assert set(steps) == set(names)
    assert len(set(steps.values())) > 8 and max(steps.values()) <= 256

"""The calendar of steps against its naive twin: look at every request in every step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.runtime.due import STRIDE, DueRequests


def test_a_request_is_looked_at_when_it_has_got_its_tokens() -> None:
    due = DueRequests()
    due.look_again("a", 3)
    assert [due.next_step({"a": 1}, 1) for _ in range(4)] == [[], [], ["a"], []]
    assert len(due) == 0


def test_several_tokens_in_one_step_are_a_reason_to_look() -> None:
    due = DueRequests()
    due.look_again("a", 30)
    due.look_again("b", 30)
    assert due.next_step({"a": 1, "b": 8}, 9) == ["b"]
    assert due.next_step({"a": 1, "unknown": 8}, 9) == ["unknown"]


def test_one_that_does_not_run_in_its_step_is_looked_at_when_it_does() -> None:
    due = DueRequests()
    due.look_again("a", 1)
    assert due.next_step({}, 0) == due.next_step({"b": 1}, 1) == []
    assert due.next_step({"a": 1}, 1) == ["a"]


def test_what_is_forgotten_or_asked_for_again_is_not_looked_at_twice() -> None:
    due = DueRequests()
    due.look_again("a", 1)
    due.forget("a")
    due.forget("never known")
    due.look_again("b", 1)
    due.look_again("b", 2)
    assert due.next_step({"a": 1, "b": 1}, 2) == []
    assert due.next_step({"a": 1, "b": 1}, 2) == ["b"]


STEPS = st.lists(st.dictionaries(st.sampled_from("abcde"), st.sampled_from([1, 1, 1, 2, 7])), max_size=60)


@given(steps=STEPS, block=st.integers(1, 6))
def test_no_full_block_is_missed(steps: list[dict[str, int]], block: int) -> None:
    """Whoever fills a block in a step is looked at in that step, and not much more often than that."""
    due = DueRequests()
    length: dict[str, int] = {}
    for scheduled in steps:
        found = due.next_step(scheduled, sum(scheduled.values()))
        assert len(set(found)) == len(found)
        found += [
            key for key in scheduled if key not in length and key not in found
        ]  # new ones are always looked at
        full = set()
        for key, tokens in scheduled.items():
            before = length.get(key, 0)
            length[key] = before + tokens
            if before // block != length[key] // block:
                full.add(key)
        assert full <= set(found) <= set(scheduled)
        for key in found:
            due.look_again(key, block - length[key] % block)
    assert len(due) == len(length)


def test_those_that_may_wait_are_looked_at_together() -> None:
    due = DueRequests()
    for tokens, name in enumerate("abcdefgh", start=1):
        due.look_again(name, tokens, may_wait=True)
    due.look_again("exact", 3)
    running = dict.fromkeys([*"abcdefgh", "exact"], 1)
    steps = [due.next_step(running, len(running)) for _ in range(STRIDE)]
    assert steps == [[], [], ["exact"], *([[]] * (STRIDE - 4)), list("abcdefgh")]


def test_a_step_passes_quietly_only_if_nobody_is_due_in_it() -> None:
    due = DueRequests[int]()
    due.look_again(7, 2)
    assert due.passes_quietly()
    assert not due.passes_quietly() and not due.passes_quietly(), "nothing has begun"
    assert due.next_step({7: 1}, 1) == [7]
    assert due.passes_quietly()

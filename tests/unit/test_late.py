"""Late I/O: who may touch memory still, and who hears that nobody does any more."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_core.storage.late import LateMemory

LONG_S = 120.0
A, B, C, D = 4096, 8192, 12288, 16384


def test_memory_is_held_until_the_request_ends() -> None:
    late = LateMemory()
    assert not late.holds(A) and len(late._requests) == 0
    token = late.add([A, B])
    assert late.holds(A) and late.holds(B) and not late.holds(C) and len(late._requests) == 1
    late.end(token)
    assert not late.holds(A) and not late.holds(B) and len(late._requests) == 0


def test_an_address_of_two_requests_is_held_until_both_have_ended() -> None:
    late = LateMemory()
    first, second = late.add([A, B]), late.add([B])
    assert first != second
    late.end(first)
    assert not late.holds(A) and late.holds(B)
    late.end(second)
    assert not late.holds(B)


def test_a_request_ends_once() -> None:
    late = LateMemory()
    token = late.add([A])
    late.end(token)
    with pytest.raises(KeyError):
        late.end(token)


def test_what_is_free_is_not_waited_for() -> None:
    late, calls = LateMemory(), list[str]()
    late.add([A])
    assert not late.when_free([B, C], lambda: calls.append("b"))
    assert not late.when_free([], lambda: calls.append("none"))
    assert calls == []


def test_whoever_waits_for_several_requests_is_called_once_after_the_last() -> None:
    late, calls = LateMemory(), list[str]()
    one, two, other = late.add([A, B]), late.add([B, C]), late.add([D])
    assert late.when_free([A, C], lambda: calls.append("both"))
    assert late.when_free([B], lambda: calls.append("b"))
    assert late.when_free([A], lambda: calls.append("a"))
    late.end(one)
    assert calls == ["a"]
    late.end(other)
    assert calls == ["a"]
    late.end(two)
    assert calls == ["a", "both", "b"]  # in the order in which they asked


def test_what_comes_after_the_question_is_not_waited_for() -> None:
    late, calls = LateMemory(), list[str]()
    token = late.add([A])
    assert late.when_free([A], lambda: calls.append("a"))
    later = late.add([A])
    late.end(token)
    assert calls == ["a"] and late.holds(A)
    late.end(later)
    assert calls == ["a"]


def test_memory_is_free_when_its_waiters_are_called_and_they_may_ask_again() -> None:
    late, heard = LateMemory(), list[bool]()
    token = late.add([A])

    def on_free() -> None:
        heard.append(late.holds(A))
        again = late.add([A])
        assert late.when_free([A], lambda: heard.append(late.holds(A)))
        late.end(again)

    assert late.when_free([A], on_free)
    late.end(token)
    assert heard == [False, False] and len(late._requests) == 0


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "end", "wait"]), st.sets(st.integers(0, 5))), max_size=40),
    st.integers(0, 2**32),
)
def test_any_history_is_that_of_a_naive_table(steps: list[tuple[str, set[int]]], seed: int) -> None:
    rng, late = random.Random(seed), LateMemory()
    open_requests: dict[int, set[int]] = {}
    waiting: dict[int, set[int]] = {}
    called: list[int] = []
    for number, (what, addresses) in enumerate(steps):
        if what == "add":
            open_requests[late.add(addresses)] = addresses
        elif what == "end" and open_requests:
            token = rng.choice(sorted(open_requests))
            del open_requests[token]
            expected = [waiter for waiter, tokens in waiting.items() if tokens == {token}]
            waiting = {w: tokens - {token} for w, tokens in waiting.items() if w not in expected}
            before = len(called)
            late.end(token)
            assert called[before:] == expected
        elif what == "wait":
            tokens = {token for token, own in open_requests.items() if own & addresses}
            assert late.when_free(addresses, lambda number=number: called.append(number)) is bool(tokens)  # type: ignore[misc]
            if tokens:
                waiting[number] = tokens
        for address in range(6):
            assert late.holds(address) is any(address in own for own in open_requests.values())
        assert len(late._requests) == len(open_requests)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_threads_that_end_and_ask_at_once_lose_no_call() -> None:
    """Each question is answered by False, or by exactly one call, after all that it is about has ended."""
    late, num_threads, rounds = LateMemory(), 4, 200
    over: set[tuple[int, int]] = set()
    failures: list[BaseException] = []
    calls = [0]
    asked = [0]
    lock = threading.Lock()

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for turn in range(rounds):
                token = late.add([A, number])
                own = (number, turn)

                def on_free(own: tuple[int, int] = own) -> None:
                    with lock:
                        calls[0] += 1
                        assert own in over

                if late.when_free([A] if rng.random() < 0.5 else [number], on_free):
                    with lock:
                        asked[0] += 1
                assert late.holds(number)
                with lock:
                    over.add(own)
                late.end(token)
                assert not late.holds(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert failures == [] and calls == asked == [num_threads * rounds] and len(late._requests) == 0

"""Late I/O: who may touch memory still, and who hears that nobody does any more."""

from __future__ import annotations

import gc
import mmap
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbm_core.storage.late as late_module
from kvbm_core.storage.late import LateMemory, Span, ranges_of
from kvbm_core.testing.executor_bench import is_mapped

LONG_S = 120.0
TraceFunction = Callable[[FrameType, str, Any], Any]
A, B, C, D = [[(at, at + 4096)] for at in range(4096, 5 * 4096, 4096)]


def is_empty(late: LateMemory) -> bool:
    """Nothing of what is over is left."""
    return not (late._requests or late._waiters)


def test_memory_is_held_until_the_request_ends() -> None:
    late = LateMemory()
    assert not late.holds(A) and is_empty(late)
    token = late.add(A + C)
    assert late.holds(A) and late.holds(C) and late.holds(B + C)
    assert not late.holds(B) and not late.holds(B + D) and not late.holds([])
    late.end(token)
    assert not late.holds(A + B + C + D) and is_empty(late)


def test_any_part_of_it_counts_and_its_neighbor_does_not() -> None:
    late = LateMemory()
    late.add([(100, 200)])
    for start, end in ((100, 200), (0, 101), (199, 300), (0, 1000), (150, 151)):
        assert late.holds([(start, end)])
    for start, end in ((0, 100), (200, 300)):
        assert not late.holds([(start, end)])


def test_an_address_of_two_requests_is_held_until_both_have_ended() -> None:
    late = LateMemory()
    first, second = late.add(A + B), late.add(B)
    assert first != second
    late.end(first)
    assert not late.holds(A) and late.holds(B)
    late.end(second)
    assert not late.holds(B)


def test_a_request_ends_once() -> None:
    late = LateMemory()
    token = late.add(A)
    late.end(token)
    with pytest.raises(KeyError):
        late.end(token)


def test_memory_is_neither_freed_nor_unmapped_until_its_request_ends() -> None:
    late = LateMemory()
    memory = memoryview(mmap.mmap(-1, 1 << 20))
    ((start, _),) = spans = ranges_of(memory)
    first, second = late.add(spans, memory), late.add(ranges_of(memory[4096:]), memory[4096:])
    del memory
    for token in (first, second):
        gc.collect()
        assert is_mapped(start)
        late.end(token)
    gc.collect()
    assert not is_mapped(start)


def test_what_never_ends_is_kept_for_good() -> None:
    class Thing:
        pass

    late, thing = LateMemory(), Thing()
    kept = weakref.ref(thing)
    late.add((), thing)
    del thing
    gc.collect()
    assert kept() is not None and not late.holds(A + B + C + D)


def test_what_is_free_is_not_waited_for() -> None:
    late, calls = LateMemory(), list[str]()
    late.add(A)
    assert not late.when_free(B + C, lambda: calls.append("b"))
    assert not late.when_free([], lambda: calls.append("none"))
    assert calls == []


def test_whoever_waits_for_several_requests_is_called_once_after_the_last() -> None:
    late, calls = LateMemory(), list[str]()
    one, two, other = late.add(A + B), late.add(B + C), late.add(D)
    assert late.when_free(A + C, lambda: calls.append("both"))
    assert late.when_free(B, lambda: calls.append("b"))
    assert late.when_free(A, lambda: calls.append("a"))
    late.end(one)
    assert calls == ["a"]
    late.end(other)
    assert calls == ["a"]
    late.end(two)
    assert calls == ["a", "both", "b"]  # in the order in which they asked


def test_a_request_that_is_handed_on_is_waited_for_too() -> None:
    """A call comes back after all, and has left its memory to the library below."""
    late, calls = LateMemory(), list[str]()
    token = late.add(A)
    assert late.when_free(A, lambda: calls.append("a"))
    later = late.add(A)
    late.end(token)
    assert calls == [] and late.holds(A)
    late.end(later)
    assert calls == ["a"]


def test_memory_is_free_when_its_waiters_are_called_and_they_may_ask_again() -> None:
    late, heard = LateMemory(), list[bool]()
    token = late.add(A)

    def on_free() -> None:
        heard.append(late.holds(A))
        again = late.add(A)
        assert late.when_free(A, lambda: heard.append(late.holds(A)))
        late.end(again)

    assert late.when_free(A, on_free)
    late.end(token)
    assert heard == [False, False] and is_empty(late)


def test_one_that_fails_when_it_is_called_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    late, calls = LateMemory(), list[str]()
    token = late.add(A)

    def fail() -> None:
        raise RuntimeError("a bug")

    for on_free in (fail, lambda: calls.append("next")):
        assert late.when_free(A, on_free)
    late.end(token)
    assert calls == ["next"] and is_empty(late)
    assert caplog.messages == ["kvbm: listener failed on memory that is free"]


class Asker:
    """Gives up, ends and asks; notes who was called, and ``wrong``: who was called twice, or too soon."""

    def __init__(self) -> None:
        self.late = LateMemory()
        self.tokens = {self.late.add(A): A, self.late.add(B): B}
        self.asked, self.called, self.wrong = list[str](), list[str](), list[str]()

    def ask(self, name: str, spans: list[Span]) -> None:
        self.asked.append(name)
        if not self.late.when_free(spans, lambda: self.hear(name, spans)):
            self.hear(name, spans)

    def hear(self, name: str, spans: list[Span]) -> None:
        if name in self.called or self.late.holds(spans):
            self.wrong.append(name)
        self.called.append(name)

    def end(self, spans: list[Span]) -> None:
        (token,) = [token for token, own in self.tokens.items() if own is spans]
        del self.tokens[token]
        self.late.end(token)

    def amid(self) -> None:
        """What a finalizer may do: it ends a request, gives one up, and asks."""
        self.end(B)
        self.tokens[self.late.add(C)] = C
        self.ask("amid", C)


CALLS: dict[str, Callable[[Asker], object]] = {
    "add": lambda asker: asker.tokens.setdefault(asker.late.add(D), D),
    "end": lambda asker: asker.end(A),
    "ask": lambda asker: asker.ask("outer", B + A),
    "ask what is free": lambda asker: asker.ask("outer", D),
    "look": lambda asker: asker.late.holds(A),
}


def with_a_call_at(line: int, call: Callable[[], object], amid: Callable[[], None]) -> bool:
    """Makes ``call``, and ``amid`` of it, in the same thread, before the table's line of this number. False
    if it has not so many.
    """
    left = line

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal left
        if frame.f_code.co_filename != late_module.__file__:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                amid()
        return trace

    def run() -> None:
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive(), "it waits for itself"
    return left < 0


@pytest.mark.parametrize("outer", CALLS)
def test_a_call_amid_another_one_of_the_same_thread_loses_nothing(outer: str) -> None:
    """A finalizer may come between any two lines."""
    line, is_there = 0, True
    while is_there:
        asker = Asker()
        for name, spans in (("a", A), ("b", B), ("ab", A + B)):
            asker.ask(name, spans)
        is_there = with_a_call_at(line, partial(CALLS[outer], asker), asker.amid)
        for token in asker.tokens:
            asker.late.end(token)
        assert not asker.wrong and sorted(asker.called) == sorted(asker.asked) and is_empty(asker.late)
        line += 1
    assert line > 2, "a call came between two lines"


def test_what_is_late_is_told_twice_and_what_is_not_once() -> None:
    late, told = LateMemory(), list[tuple[str, bool]]()
    token = late.add(A)
    late.tell_when_free(iter(A + B), lambda *, is_late: told.append(("late", is_late)))
    late.tell_when_free(iter(B), lambda *, is_late: told.append(("free", is_late)))
    assert told == [("late", True), ("free", False)]
    late.end(token)
    assert told[2:] == [("late", False)] and is_empty(late)


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)).map(lambda s: (s[0], sum(s))), max_size=4)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "end", "wait"]), SPANS), max_size=40),
    st.integers(0, 2**32),
)
def test_any_history_is_that_of_a_naive_table(steps: list[tuple[str, list[Span]]], seed: int) -> None:
    rng, late = random.Random(seed), LateMemory()
    open_requests: dict[int, list[Span]] = {}
    waiting: dict[int, list[Span]] = {}
    called: list[int] = []

    def is_late(spans: list[Span]) -> bool:
        touched = {at for own in open_requests.values() for start, end in own for at in range(start, end)}
        return any(not touched.isdisjoint(range(start, end)) for start, end in spans)

    for number, (what, spans) in enumerate(steps):
        if what == "add":
            open_requests[late.add(spans)] = spans
        elif what == "end" and open_requests:
            token = rng.choice(sorted(open_requests))
            before = len(called)
            del open_requests[token]
            late.end(token)
            assert called[before:] == [waiter for waiter, own in waiting.items() if not is_late(own)]
            waiting = {waiter: own for waiter, own in waiting.items() if is_late(own)}
        elif what == "wait":
            assert late.when_free(spans, partial(called.append, number)) is is_late(spans)
            if is_late(spans):
                waiting[number] = spans
        for address in range(50):
            assert late.holds([(address, address + 1)]) is is_late([(address, address + 1)])
        assert late.holds(spans) is is_late(spans) and len(late._requests) == len(open_requests)
    for token in open_requests:
        late.end(token)
    assert is_empty(late)


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
    calls, asked = [0], [0]
    lock = threading.Lock()

    def work(number: int) -> None:
        rng = random.Random(number)
        mine = [(number, number + 1)]
        try:
            for turn in range(rounds):
                token = late.add(A + mine)
                own = (number, turn)

                def on_free(own: tuple[int, int] = own) -> None:
                    with lock:
                        calls[0] += 1
                        if own not in over:
                            failures.append(AssertionError("called while its own request was open"))

                if late.when_free(A if rng.random() < 0.5 else mine, on_free):
                    with lock:
                        asked[0] += 1
                assert late.holds(mine)
                with lock:
                    over.add(own)
                late.end(token)
                assert not late.holds(mine)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert failures == [] and calls == asked == [num_threads * rounds] and is_empty(late)

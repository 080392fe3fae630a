"""Orders on their way from a wire's thread to who may carry them out."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvbm_core.control.messages import FoundPrompt, Order, Result, Verb
from kvbm_core.control.tiers import refusal, tiers_of, told
from kvbm_core.types import Tier

log = logging.getLogger("kvbm")

MAX_WAITING = 16


class Report(NamedTuple):
    """How an order ended."""

    result: Result
    text: str = ""
    found: FoundPrompt | None = None


PROMPT_VERBS = frozenset({Verb.LOOKUP, Verb.PIN, Verb.UNPIN, Verb.QUOTA})
NO_TENANTS = "this engine does not tell kvbm the tokens, salt and adapter of a block: reset whole tiers"
BUSY = Report(Result.REFUSED, f"{MAX_WAITING} orders are waiting already; ask again later")


@dataclass(frozen=True)
class About:
    """What an instance says of itself. ``rank``: its data-parallel rank, or that of its tiers. ``namespace``:
    digest of all that its blocks depend on but weights, adapter and salt; "" while it is not known.
    ``no_reasons``: why it cannot tell what requests missed; "" if it can.
    """

    engine: str
    model: str
    rank: int
    namespace: Callable[[], str] = lambda: ""
    no_reasons: str = ""


class Controlled(Protocol):
    """An engine's cache, as a wire sees it. ``later``: why an order that was taken may wait."""

    is_draining: bool
    later: str

    def submit(self, order: Order) -> Future[Report]:
        """Never waits; any thread."""


@dataclass(eq=False)
class Task:
    """An order, and who waits for its end."""

    order: Order
    end: Future[Report] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.end.set_running_or_notify_cancel()  # nobody who waits for it can take it back

    def ended(self, result: Result, text: str = "", found: FoundPrompt | None = None) -> None:
        """Carried out, or not; once."""
        self.end.set_result(Report(result, text, found))


class Desk:
    """For an engine whose cache one thread alone may touch: that thread takes what waits here, at its next
    step. ``is_draining`` is that thread's to set. Bounded.
    """

    later = "the engine carries it out at its next step, before it looks up the next request"

    def __init__(self) -> None:
        self.is_draining = False
        self.nudge: Callable[[], None] = lambda: None
        """Called by who has put an order here: an idle engine takes no step."""
        self._waiting: deque[Task] = deque()
        self._lock = threading.Lock()

    def submit(self, order: Order) -> Future[Report]:
        """See Controlled."""
        task = Task(order)
        with self._lock:
            is_full = len(self._waiting) >= MAX_WAITING
            if not is_full:
                self._waiting.append(task)
        if is_full:
            task.end.set_result(BUSY)
        self.nudge()
        return task.end

    @property
    def has_waiting(self) -> bool:
        """Whether ``take`` has something. Any thread."""
        return bool(self._waiting)

    def take(self) -> Task | None:
        """The oldest one; on the engine's thread."""
        return self._waiting.popleft() if self._waiting else None


class AtOnce:
    """For a cache that any thread may touch. ``tiers``: those that there are. ``reset`` forgets all blocks of
    some of them, on a thread that lives as long as that takes; False: nothing was forgotten, as loads did not
    end. One order at a time.
    """

    later = "what is being loaded ends first"

    def __init__(
        self, tiers: Callable[[], frozenset[Tier]], reset: Callable[[frozenset[Tier]], bool]
    ) -> None:
        self.is_draining = False
        self._tiers = tiers
        self._reset = reset
        self._turn = threading.Lock()

    def submit(self, order: Order) -> Future[Report]:
        """See Controlled."""
        task = Task(order)
        if self._turn.acquire(blocking=False):
            threading.Thread(target=self._run, args=(task,), name="kvbm-order", daemon=True).start()
        else:
            task.end.set_result(Report(Result.REFUSED, "another order is under way; ask again later"))
        return task.end

    def _run(self, task: Task) -> None:
        try:
            report = self._carry_out(task.order)
        except Exception as error:  # the operator is to hear of it; the engine serves on
            log.exception("kvbm: an operator's order could not be carried out")
            report = Report(Result.REFUSED, f"it failed: {type(error).__name__}: {error}")
        finally:
            self._turn.release()
        task.end.set_result(report)

    def _carry_out(self, order: Order) -> Report:
        if order.verb in PROMPT_VERBS or order.salt is not None or order.adapter is not None or order.tokens:
            return Report(Result.REFUSED, NO_TENANTS)
        if order.verb is not Verb.RESET:
            self.is_draining = order.verb is Verb.DRAIN
            log.warning("kvbm: an operator's order: %s", order.verb)
            return Report(Result.DONE)
        there = self._tiers()
        if not there:
            return Report(Result.DONE, "nothing to do: it keeps nothing")
        tiers = tiers_of(order, there)
        if not tiers:
            return Report(Result.REFUSED, refusal(order))
        if not self._reset(tiers):
            return Report(Result.REFUSED, "loads do not end; nothing was forgotten")
        log.warning("kvbm: an operator's order: reset; %s", told(tiers))
        return Report(Result.DONE, told(tiers))

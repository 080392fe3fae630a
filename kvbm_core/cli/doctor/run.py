"""Runs checks side by side, each on a thread of its own, and gives up those that do not end."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvbm_core.cli.doctor.check import Check, Finding, Level, Subject, error, warning
from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import ConfigError

MAX_CHARS = 400
OnDone = Callable[["Looked"], None]


class Looked(NamedTuple):
    """A check that has ended, or was given up."""

    check: Check
    findings: tuple[Finding, ...]
    took_s: float

    @property
    def level(self) -> Level | None:
        """Of its worst finding; None without any."""
        return max((finding.level for finding in self.findings), key=list(Level).index, default=None)


def run_checks(
    checks: Sequence[Check],
    subject: Subject,
    on_done: OnDone = lambda looked: None,
    clock: Clock | None = None,
) -> list[Looked]:
    """All of them, in their order. ``on_done`` is called with each when it has ended, in this thread.

    A check that is given up goes on on its thread, which keeps no process from ending.
    """
    clock = clock or SystemClock()
    ended: queue.SimpleQueue[tuple[int, Looked]] = queue.SimpleQueue()

    def look(number: int, check: Check) -> None:
        started_s = clock.now_s()
        findings = _findings_of(check, subject)
        ended.put((number, Looked(check, findings, clock.now_s() - started_s)))

    with _quiet_log():
        began_s = clock.now_s()
        for number, check in enumerate(checks):
            thread = threading.Thread(
                target=look, args=(number, check), name=f"kvbm-{check.name}", daemon=True
            )
            thread.start()
        found: dict[int, Looked] = {}
        while len(found) < len(checks):
            waiting = [number for number in range(len(checks)) if number not in found]
            next_s = min(checks[number].deadline_s for number in waiting) - (clock.now_s() - began_s)
            try:
                number, looked = ended.get(timeout=max(0.0, next_s))
            except queue.Empty:
                late_s = clock.now_s() - began_s
                number = next(number for number in waiting if checks[number].deadline_s <= late_s)
                looked = _given_up(checks[number])
            if number not in found:
                found[number] = looked
                on_done(looked)
    return [found[number] for number in range(len(checks))]


def _given_up(check: Check) -> Looked:
    seen = f"did not end within {check.deadline_s:g} s"
    remedy = f"something that it needs hangs; it looks at: {check.about}"
    return Looked(check, (error(seen, remedy),), check.deadline_s)


def _findings_of(check: Check, subject: Subject) -> tuple[Finding, ...]:
    found: list[Finding] = []
    try:
        found.extend(check.look(subject))
    except ConfigError as problem:
        found.append(of_config_error(problem))
    except Exception as problem:  # whatever it is: one check costs no other
        seen = f"could not be looked at: {type(problem).__name__}: {problem}"
        found.append(
            warning(seen, "look at what it names; if that is in order, report this as a bug of kvbm")
        )
    return tuple(map(_for_people, found))


def of_config_error(problem: ConfigError) -> Finding:
    """What is wrong with a setting, and what to do."""
    return error(f"{problem.setting}={problem.value}", problem.remedy)


def _for_people(finding: Finding) -> Finding:
    """On one line each, without anything that a terminal might heed: some of it came over a wire."""
    return finding._replace(seen=_plain(finding.seen), remedy=_plain(finding.remedy))


def _plain(text: str) -> str:
    line = " ".join(text.split())
    plain = "".join(char if char.isprintable() else "?" for char in line)
    return plain if len(plain) <= MAX_CHARS else f"{plain[:MAX_CHARS]} ..."


@contextmanager
def _quiet_log() -> Iterator[None]:
    """What kvbm logs meanwhile is said by findings."""
    logger = logging.getLogger("kvbm")
    propagates, handler = logger.propagate, logging.NullHandler()
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.propagate = propagates
        logger.removeHandler(handler)

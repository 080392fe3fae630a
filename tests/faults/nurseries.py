"""Processes that are killed while they write: both sides of a warm interpreter that forks one for each line.

Lines in: the moment of the kill, and what to write. Lines out: ``pid <n>``, then ``put <call>`` before each
call, ``now`` at the moment unless the writer kills itself, and ``dead <wait status>`` when it is gone.

A moment is counted by what the writer does, not by the clock: a seed gives the same ones on any machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import IO, NamedTuple

from kvbm_core.testing.store_contract import LONG_S

ROOT = Path(__file__).parents[2]
MOST_CALLS = 20_000
"""A writer that nobody kills ends some time."""
PARTS = 3
"""Of a call, which are struck in turn."""


class Moment(NamedTuple):
    """``call``: in which one a writer is killed. ``share``: how much of it is done by then, from 0 to 1 of
    what the call before took. ``is_own``: the writer kills itself at that very place in the code, and else
    tells its test and goes on, so that it is killed at any instruction behind that place.
    """

    call: int
    share: float
    is_own: bool

    @staticmethod
    def of(rng: Random, kill: int, calls: Sequence[int] = range(2, 5)) -> Moment:
        """For the kill with this number, in one of ``calls``: not in the first two, which open what the
        others use. Every second one is the writer's own, and each part of a call has its turn.
        """
        share = (kill // 2 % PARTS + rng.random()) / PARTS
        return Moment(rng.choice(calls), share, is_own=kill % 2 == 0)

    def line(self, order: str) -> str:
        """As a warm interpreter takes it."""
        return f"{self.call} {self.share} {int(self.is_own)} {order}\n"

    @property
    def is_early(self) -> bool:
        """Whether the call has certainly not ended by then."""
        return self.is_own and self.share < 1 / PARTS


class Countdown:
    """Counts where functions begin and end, in this thread and in those that are started from now on, and
    calls ``strike`` when there were enough, once.
    """

    def __init__(self, strike: Callable[[], None]) -> None:
        self.count = 0
        self._strike = strike
        self._left: int | None = None
        threading.setprofile(self._pass)
        sys.setprofile(self._pass)

    def strike_after(self, num_events: int) -> None:
        """From now on."""
        self._left = num_events

    def stop(self) -> None:
        """Counts no more."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _pass(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += 1
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._left = None
                self._strike()


# -------------------------------------------------------------------- in the interpreter, and in writers


def say(*words: object) -> None:
    """One line, at once and in one piece."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Calls:
    """What a writer says of its calls, and its kill in one of them; made before the threads that count."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._countdown = Countdown(_die if moment.is_own else partial(say, "now"))
        self._counted = 0

    def begin(self, call: int) -> None:
        """Just before each."""
        moment = self._moment
        if moment.is_own and call > moment.call:
            _die()  # the one before was shorter than the one before that
        say("put", call)
        if call == moment.call:
            self._countdown.strike_after(int(moment.share * (self._countdown.count - self._counted)))
        self._counted = self._countdown.count


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fork_for_each_line(write: Callable[[str, Moment], None]) -> None:
    """Until standard input ends: each line is given to a writer of its own, which somebody kills."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                say("pid", os.getpid())
                call, share, is_own, order = line.rstrip("\n").split(" ", 3)
                write(order, Moment(int(call), float(share), is_own == "1"))
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(1)
        say("dead", os.waitpid(pid, 0)[1])


# -------------------------------------------------------------------- in a test


@contextmanager
def nursery(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The warm interpreter of this module."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # it waits for its child, which may be frozen
            raise
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LONG_S) == 0


def pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """Its standard input and output."""
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def kill_one(
    process: subprocess.Popen[str],
    order: str,
    moment: Moment,
    on_begin: Callable[[], None] = lambda: None,
) -> int:
    """Has a writer started, and killed at this moment; ``on_begin`` before its first call. The number of the
    last call that it has begun.
    """
    commands, answers = pipes(process)
    commands.write(moment.line(order))
    word, pid = answers.readline().split()
    assert word == "pid"
    last = -1
    while (line := answers.readline()).startswith(("put ", "now")):
        if line.startswith("put "):
            last = int(line.split()[1])
            if last == 0:
                on_begin()
        else:
            os.kill(int(pid), signal.SIGKILL)
    assert last >= moment.call, f"the writer did not come to its call {moment.call}: {line}"
    assert line.split() == ["dead", str(int(signal.SIGKILL))]
    return last

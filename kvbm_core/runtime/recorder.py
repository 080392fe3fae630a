"""Records which requests came (DYN_KVBM_ENABLE_RECORD), for ``kvbm replay`` and ``kvbm plan``.

Times, lengths, and a number for each block: no prompt, no answer. A number is a keyed hash whose key is never
written, so nobody who has the file can try whether a prompt was among them.
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from datetime import datetime, timezone
from hashlib import blake2b
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import msgspec

from kvbm_core.clock import Clock

log = logging.getLogger("kvbm")

TRACE_VERSION = 1
NUM_FILES = 8
"""A recording is in so many files; the oldest goes when one more is begun."""
MAX_WAITING_BLOCKS = 500_000
"""Of requests that have ended and are not written yet; what comes beyond that is left out and counted."""
FLUSH_S = 1.0
_ID_BYTES = 6
"""2 ** 48 numbers: fewer than one pair in a million is the same by chance among 20,000 blocks."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class RecordHeader(msgspec.Struct, frozen=True):
    """The first line of each file."""

    kvbm_trace: int
    block_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class RecordedRequest(msgspec.Struct, frozen=True):
    """A line, in the order in which requests ended. ``timestamp``: when it came, in ms since the recording
    began. ``output_length``: what of the answer is in full blocks. ``hash_ids``: of all full blocks, the
    prompt's first.
    """

    timestamp: Count
    input_length: Count
    output_length: Count
    hash_ids: list[int]


class _Ended(NamedTuple):
    came_s: float
    prompt_tokens: int
    hashes: Sequence[bytes]


class Recorder:
    """The requests of one leader, in files of ``folder``/TIME-PID-WORD, which have ``max_bytes`` together.

    ``ended`` is called on the leader's thread and costs an append; a thread of the recorder does the rest.
    """

    def __init__(self, folder: Path, block_tokens: int, max_bytes: int, clock: Clock) -> None:
        self._clock = clock
        self._block_tokens = block_tokens
        self._file_bytes = max(1, max_bytes // NUM_FILES)
        self._began_s = clock.now_s()
        self._key = secrets.token_bytes(32)
        self._waiting: deque[_Ended] = deque()
        # What has come in all, counted on the leader's thread, and what of it has gone, on the recorder's.
        self._blocks_in = self._blocks_out = 0
        self._is_over = False
        self._num_dropped = 0
        self._files: deque[Path] = deque()
        self._num_files = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{os.getpid()}-"
        self._folder = Path(tempfile.mkdtemp(prefix=name, dir=folder))  # a process may have several leaders
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbm-recorder", daemon=True)
        self._thread.start()
        log.info("kvbm: requests are recorded in %s", self._folder)

    def ended(self, came_s: float, prompt_tokens: int, hashes: Sequence[bytes]) -> None:
        """A request is over. ``hashes``, of its full blocks, are not changed afterward."""
        if self._is_over:
            return
        if self._blocks_in - self._blocks_out > MAX_WAITING_BLOCKS:
            self._num_dropped += 1
            return
        self._blocks_in += len(hashes)
        self._waiting.append(_Ended(came_s, prompt_tokens, hashes))

    def close(self) -> None:
        """Writes what waits, and ends. May be called twice."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        file: IO[bytes] | None = None
        try:
            while True:
                is_last = self._stop.wait(FLUSH_S)
                file = self._write(file)
                if is_last:
                    break
        except OSError as error:
            self._is_over = True
            self._waiting.clear()
            log.error("kvbm: requests are not recorded any more: %s", error)
        finally:
            if file is not None:
                file.close()
        if self._num_dropped:
            log.warning("kvbm: %d requests came too fast to be recorded", self._num_dropped)

    def _write(self, file: IO[bytes] | None) -> IO[bytes] | None:
        """What waits; answers the file that is written now."""
        for _ in range(len(self._waiting)):
            ended = self._waiting.popleft()
            self._blocks_out += len(ended.hashes)
            line = self._line(ended)
            if file is None or file.tell() + len(line) > self._file_bytes:
                file = self._next_file(file)
            file.write(line)
        if file is not None:
            file.flush()
        return file

    def _line(self, ended: _Ended) -> bytes:
        size, key = self._block_tokens, self._key
        ids = [
            int.from_bytes(blake2b(digest, digest_size=_ID_BYTES, key=key).digest(), "little")
            for digest in ended.hashes
        ]
        answer_tokens = max(0, len(ids) * size - ended.prompt_tokens)
        at_ms = round(1000 * (ended.came_s - self._began_s))
        recorded = RecordedRequest(at_ms, ended.prompt_tokens, answer_tokens, ids)
        return msgspec.json.encode(recorded) + b"\n"

    def _next_file(self, file: IO[bytes] | None) -> IO[bytes]:
        if file is not None:
            file.close()
        path = self._folder / f"{self._num_files:06}.jsonl"
        self._num_files += 1
        self._files.append(path)
        if len(self._files) > NUM_FILES:
            self._files.popleft().unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        opened = os.fdopen(handle, "wb")
        opened.write(msgspec.json.encode(RecordHeader(TRACE_VERSION, self._block_tokens)) + b"\n")
        return opened

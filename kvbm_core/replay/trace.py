"""Request traces: who asked when, with which prefix. Three formats, one JSON object a line.

Mooncake's: ``timestamp`` in ms, blocks of 512 tokens. Bailian's (it has ``chat_id``): ``timestamp`` in
seconds, blocks of 16 tokens, whose ids do not depend on what stands before them. kvbm's own, which
``runtime/recorder.py`` writes: a first line says how large blocks are, and the ids of answers come after
those of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from kvbm_core.runtime.recorder import TRACE_VERSION, Count, RecordedRequest, RecordHeader

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
MAX_LINE_BYTES = 256 << 20
_FILES = "*.jsonl"

Time = Annotated[float, msgspec.Meta(ge=0, le=2**53)]


class TraceError(ValueError):
    """The file is not such a trace: one line with the file, the line and what is wrong."""


@dataclass(frozen=True, slots=True)
class Request:
    """``ids``: of the full blocks, the prompt's first and then the answer's, if the trace has those. Equal
    ids are equal prefixes.

    ``prompt_blocks``: how many are the prompt's. ``reusable_blocks``: how many can be taken instead of
    computed, as at least one token is left to compute.
    """

    at_s: float
    prompt_tokens: int
    prompt_blocks: int
    reusable_blocks: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times; their blocks have ``block_tokens`` tokens."""

    name: str
    block_tokens: int
    requests: Sequence[Request]

    @property
    def seconds(self) -> float:
        """From the first request to the last."""
        return self.requests[-1].at_s - self.requests[0].at_s

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def distinct_blocks(self) -> int:
        """What a cache that never forgets would have in the end; at least 1."""
        return max(1, len({block for request in self.requests for block in request.ids}))

    def coarser(self, factor: int) -> Trace:
        """The same with blocks of ``factor`` times as many tokens: faster to look at, and a little fewer
        hits, as only full blocks are reused.
        """
        if factor == 1:
            return self
        tokens = self.block_tokens * factor
        requests = [
            request_of(
                request.at_s,
                request.prompt_tokens,
                request.ids[factor - 1 :: factor],
                tokens,
            )
            for request in self.requests
        ]
        return Trace(self.name, tokens, requests)


def request_of(at_s: float, prompt_tokens: int, ids: Sequence[int], block_tokens: int) -> Request:
    """``ids``: of full blocks, which name whole prefixes."""
    prompt_blocks = min(len(ids), prompt_tokens // block_tokens)
    reusable = min(prompt_blocks, max(0, prompt_tokens - 1) // block_tokens)
    return Request(at_s, prompt_tokens, prompt_blocks, reusable, ids)


class _Line(msgspec.Struct, frozen=True):
    """A line of Mooncake's or Bailian's. The last id may be that of a block that the prompt does not fill."""

    timestamp: Time
    input_length: Count
    output_length: Count
    hash_ids: list[int]
    chat_id: int | str | None = None


class Prefixes:
    """Numbers for prefixes: the same number means the same blocks from the start on."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def number(self, ids: Iterable[int]) -> list[int]:
        """One for each prefix of ``ids``, 0, 1, 2 and so on in the order in which they are first seen."""
        numbers, found, before = self._numbers, [], -1
        for block in ids:
            before = numbers.setdefault((before, block), len(numbers))
            found.append(before)
        return found


def read_trace(path: Path, block_tokens: int | None = None) -> Trace:
    """The trace in a file, or in all files of a folder, in the order of their names.

    ``block_tokens``: of a block, where the format's own number is not right. TraceError if it is no trace,
    OSError if it cannot be read.
    """
    files = sorted(path.glob(_FILES)) if path.is_dir() else [path]
    if not files:
        below = sorted(file.parent for file in path.glob(f"*/{_FILES}"))
        instead = f"; name one of its folders, such as {below[-1]}" if below else ""
        raise TraceError(f"{path}: there is no file {_FILES} in it{instead}")
    prefixes, requests, tokens = Prefixes(), list[Request](), 0
    for file in files:
        reader = _Reader(file, prefixes, block_tokens)
        requests += reader.read()
        if tokens and reader.block_tokens not in (0, tokens):
            raise TraceError(f"{file}: blocks of {reader.block_tokens} tokens, in other files of {tokens}")
        tokens = tokens or reader.block_tokens
    if not requests:
        raise TraceError(f"{path}: no request in it")
    requests.sort(key=lambda request: request.at_s)  # recorded ones are in the order of their ends
    return Trace(path.name, tokens, requests)


class _Reader:
    """One file. ``number``: the line that was read last."""

    def __init__(self, path: Path, prefixes: Prefixes, block_tokens: int | None) -> None:
        self.number = 0
        self.block_tokens = block_tokens or 0
        self._path = path
        self._prefixes = prefixes
        self._is_recorded = False
        self._last_s = 0.0
        self._lines = msgspec.json.Decoder(_Line)
        self._recorded = msgspec.json.Decoder(RecordedRequest)

    def read(self) -> Iterator[Request]:
        """Its requests."""
        with self._path.open("rb") as lines:
            for self.number, line in enumerate(iter(partial(lines.readline, MAX_LINE_BYTES), b""), 1):
                if len(line) == MAX_LINE_BYTES:
                    raise self._error("it is too long for a request")
                if line.strip():
                    try:
                        request = self._request(line)
                    except msgspec.DecodeError as error:
                        if self._is_recorded and not line.endswith(b"\n"):
                            return  # the engine was killed, or its disk full, while it wrote
                        raise self._error(str(error)) from None
                    except UnicodeDecodeError:
                        raise self._error("it is no text") from None
                    if request is not None:
                        yield request

    def _error(self, what: str) -> TraceError:
        return TraceError(f"{self._path}: line {self.number}: {what}")

    def _request(self, line: bytes) -> Request | None:
        if self._is_recorded:
            return self._of_recording(self._recorded.decode(line))
        if line.lstrip().startswith(b'{"kvbm_trace"'):
            header = msgspec.json.decode(line, type=RecordHeader)
            if header.kvbm_trace != TRACE_VERSION:
                raise self._error(f"this kvbm reads version {TRACE_VERSION} of its format")
            self._is_recorded, self.block_tokens = True, header.block_tokens
            return None
        return self._of_line(self._lines.decode(line))

    def _of_recording(self, line: RecordedRequest) -> Request:
        most = (line.input_length + line.output_length) // self.block_tokens
        if len(line.hash_ids) > most:
            raise self._error(f"{len(line.hash_ids)} ids for {most} full blocks")
        ids = self._prefixes.number(line.hash_ids)
        return request_of(line.timestamp / 1000, line.input_length, ids, self.block_tokens)

    def _of_line(self, line: _Line) -> Request:
        is_bailian = line.chat_id is not None
        if not self.block_tokens:
            self.block_tokens = BAILIAN_BLOCK_TOKENS if is_bailian else MOONCAKE_BLOCK_TOKENS
        full = line.input_length // self.block_tokens
        if len(line.hash_ids) not in (full, -(-line.input_length // self.block_tokens)):
            raise self._error(
                f"{len(line.hash_ids)} ids for {line.input_length} tokens in blocks of {self.block_tokens}"
            )
        ids = self._prefixes.number(line.hash_ids[:full])
        at_s = line.timestamp if is_bailian else line.timestamp / 1000
        if at_s < self._last_s:
            raise self._error("its time is before that of the line above")
        self._last_s = at_s
        return request_of(at_s, line.input_length, ids, self.block_tokens)


def write_trace(path: Path, trace: Trace) -> None:
    """In kvbm's own format."""
    header = RecordHeader(TRACE_VERSION, trace.block_tokens)
    lines = [msgspec.json.encode(header)]
    for request in trace.requests:
        answer_tokens = (len(request.ids) + 1) * trace.block_tokens - request.prompt_tokens - 1
        recorded = RecordedRequest(
            round(request.at_s * 1000), request.prompt_tokens, max(0, answer_tokens), list(request.ids)
        )
        lines.append(msgspec.json.encode(recorded))
    path.write_bytes(b"\n".join(lines) + b"\n")

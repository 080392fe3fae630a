"""Objects in a Mooncake Store: memory of many machines, by TCP or RDMA."""

from __future__ import annotations

import http.client
import importlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.config.addresses import own_address
from kvbm_core.config.readers import shown
from kvbm_core.config.server_url import ServerUrl
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.observe.log import TroubleLog, get_logger
from kvbm_core.storage.call_pool import CallPool
from kvbm_core.storage.late import LATE
from kvbm_core.storage.names import ObjectInfo
from kvbm_core.storage.remote.engine import EngineTraits, GetItem, Got, PutItem
from kvbm_core.storage.remote.mooncake_setup import MooncakeSetup, read_setup, set_timeouts

THREADS = 4
BATCH_ITEMS = 64
BATCH_BYTES = 32 << 20
"""Of one batch: a batch that takes longer than the master's lease (5 s by default) fails as a whole."""
BATCH_NAMES = 1024
MAX_OBJECT_BYTES = 64 << 20
JOIN_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Between two attempts to join. The pause doubles after each failure, up to this."""
REHEARSAL_S = 10.0
"""For joining in a child process. A master that answers takes 0.1 s, and loading Mooncake 1 s."""
QUICK_S = 0.5
"""A batch of reads that took longer is not followed by a second attempt for those that failed."""
PROBE_S = 1.0
"""To connect to the master before the client does: where nobody listens, it would try for 90 s."""
CLOSE_S = 1.0

T = TypeVar("T")
log = get_logger()

_INVALID, _TRANSFER_FAILED, _IS_THERE = -600, -800, -705
_OUTCOMES = {
    -200: Outcome.NO_SPACE,
    -703: Outcome.MISS,
    -704: Outcome.MISS,
    -706: Outcome.BUSY,
    -707: Outcome.TIMED_OUT,
    -708: Outcome.BUSY,
    -710: Outcome.MISS,
    -712: Outcome.MISS,
    -901: Outcome.TIMED_OUT,
}
"""By Mooncake's error code; all others are IO_ERROR."""
_FOUND = {0: Outcome.MISS, 1: Outcome.OK}
"""By what a look-up answers, unless that is a code."""
_MEANINGS = {
    -101: "no machine gives memory to the pool",
    -200: "the pool is full",
    _TRANSFER_FAILED: "a machine of the pool does not answer",
    -900: "the master does not answer",
}
_OWN_LOG = "see Mooncake's own log on standard error (MC_LOG_LEVEL=INFO)"


class _Pieces(NamedTuple):
    """The memory of an item: addresses and sizes, without empty pieces."""

    addresses: list[int]
    sizes: list[int]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    def first(self, num_bytes: int) -> _Pieces:
        """The first ``num_bytes`` of them."""
        addresses, sizes = list[int](), list[int]()
        for address, size in zip(self.addresses, self.sizes, strict=True):
            if num_bytes <= 0:
                break
            addresses.append(address)
            sizes.append(min(size, num_bytes))
            num_bytes -= size
        return _Pieces(addresses, sizes)


class MooncakeEngine:
    """An ObjectEngine that TakesMemory. It joins in the background, and tries until that
    succeeds. ConfigError if Mooncake is not installed, or its own configuration cannot be used.

    A call of Mooncake's client cannot be stopped. One that has passed its deadline keeps its thread and its
    memory until the client returns.
    """

    traits = EngineTraits(
        concurrency=THREADS,
        batch_items=BATCH_ITEMS,
        has_capacity=True,
        max_object_bytes=MAX_OBJECT_BYTES,
    )

    def __init__(self, master: ServerUrl, clock: Clock | None = None) -> None:
        self._setup = read_setup(master, os.environ)
        self._clock = clock or SystemClock()
        self._trouble = TroubleLog()
        self._pool = CallPool("mooncake", THREADS, self._clock)
        self._membership = _Membership(master, self._setup, self._trouble)

    # ---------------------------------------------------------------- memory

    def register(self, address: int, num_bytes: int) -> None:
        """See TakesMemory."""
        self._membership.register(address, num_bytes)

    # ---------------------------------------------------------------- objects

    def put(self, items: Sequence[PutItem], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine. What is there already stays as it is."""
        pieces = [_pieces_of(item.pieces) for item in items]

        def put_part(client: Any, part: Sequence[int]) -> list[Outcome]:
            names = [items[i].name for i in part]
            addresses, sizes = [pieces[i].addresses for i in part], [pieces[i].sizes for i in part]
            codes = client.batch_put_from_multi_buffers(names, addresses, sizes)
            return [self._outcome_of(0 if code == _IS_THERE else code, "writes") for code in codes]

        sizes = [piece.num_bytes for piece in pieces]
        memory = [item.pieces for item in items]
        parts = _parts([item.name for item in items], sizes)
        return self._answers(put_part, len(items), parts, memory, deadline_s=deadline_s, made=_same)

    def get(self, items: Sequence[GetItem], *, deadline_s: float) -> list[Got]:
        """See ObjectEngine."""
        pieces = [_pieces_of(item.pieces) for item in items]
        ends_at_s = self._clock.now_s() + deadline_s

        def get_part(client: Any, part: Sequence[int]) -> list[Got]:
            return self._get_part(client, [items[i] for i in part], [pieces[i] for i in part], ends_at_s)

        sizes = [piece.num_bytes for piece in pieces]
        memory = [item.pieces for item in items]
        parts = _parts([item.name for item in items], sizes)
        return self._answers(get_part, len(items), parts, memory, deadline_s=deadline_s, made=Got)

    def _get_part(
        self, client: Any, items: Sequence[GetItem], pieces: Sequence[_Pieces], ends_at_s: float
    ) -> list[Got]:
        whole = [i for i, item in enumerate(items) if not item.offset_bytes and pieces[i].sizes]
        codes: dict[int, int] = {}
        started_s = self._clock.now_s()
        if whole:
            codes.update(zip(whole, _get_whole(client, items, pieces, whole), strict=True))
        # It refuses what is not exactly as long as the memory, with the codes of other failures.
        is_quick = self._clock.now_s() - started_s <= QUICK_S
        again = {i for i, code in codes.items() if is_quick and code in (_INVALID, _TRANSFER_FAILED)}
        answers = {i: self._got(code) for i, code in codes.items() if i not in again}
        odd = [i for i in range(len(items)) if i not in answers]
        sizes = _sizes(client, [items[i].name for i in odd]) if odd and self._is_before(ends_at_s) else {}
        for i in odd:
            size = sizes.get(items[i].name)
            if not self._is_before(ends_at_s):
                answers[i] = Got(Outcome.TIMED_OUT)
            elif size is None:
                answers[i] = Got(Outcome.MISS)
            else:
                answers[i] = self._get_odd(client, items[i], pieces[i], size)
        return [answers[i] for i in range(len(items))]

    def _is_before(self, ends_at_s: float) -> bool:
        return self._clock.now_s() < ends_at_s

    def _get_odd(self, client: Any, item: GetItem, pieces: _Pieces, size: int) -> Got:
        """Reads an object of ``size`` bytes that a batch could not: its size is not that of the memory, it is
        read from an offset, or the batch failed for another reason.
        """
        num_bytes = min(pieces.num_bytes, max(0, size - item.offset_bytes))
        if not item.offset_bytes and size > pieces.num_bytes:
            return Got(Outcome.CORRUPT)
        if not num_bytes:
            return Got(Outcome.OK)
        wanted = pieces.first(num_bytes)
        if not item.offset_bytes:
            (code,) = client.batch_get_into_multi_buffers([item.name], [wanted.addresses], [wanted.sizes])
        elif self._membership.has_registered(wanted.addresses, wanted.sizes):
            code = _get_ranges(client, item.name, item.offset_bytes, wanted)
        else:
            code = _get_around(client, item, wanted, size)
        return self._got(code)

    def _got(self, code: int) -> Got:
        outcome = self._outcome_of(code, "reads")
        return Got(outcome, code) if outcome is Outcome.OK else Got(outcome)

    def exists(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine. Objects of a machine that has died count as there for some seconds more."""

        def look(client: Any, part: list[str]) -> list[Outcome]:
            codes = client.batch_is_exist(part)
            return [_FOUND.get(code) or self._outcome_of(code, "reads") for code in codes]

        return self._of_names(look, names, deadline_s)

    def remove(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine. Also objects that are under the master's lease, as they were just read. Who reads
        one at that moment may get bytes of the next object in its place: the check of a record finds that.
        """

        def remove(client: Any, part: list[str]) -> list[Outcome]:
            return [self._outcome_of(code, "writes") for code in client.batch_remove(part, True)]

        return self._of_names(remove, names, deadline_s)

    def renew(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        """See ObjectEngine. Asking whether an object exists counts as a use of it."""
        return self.exists(names, deadline_s=deadline_s)

    def scan(self, prefix: str, *, deadline_s: float) -> Iterator[ObjectInfo]:
        """See ObjectEngine. Names come from the master's metrics port. Nothing tells when an object was used:
        ``changed_s`` is the current time.
        """
        names = sorted(name for name in self._listed(deadline_s) if name.startswith(prefix))
        for start in range(0, len(names), BATCH_NAMES):
            part = names[start : start + BATCH_NAMES]
            found: dict[str, int] = {}

            def look(client: Any, part: list[str]) -> list[Outcome]:
                found.update(_sizes(client, part))  # noqa: B023 - it is over before the next part
                return [Outcome.OK] * len(part)

            outcome, *_ = self._of_names(look, part, deadline_s)
            if outcome is not Outcome.OK:
                raise OSError(f"the master does not say how large objects are ({outcome})")
            now_s = time.time()
            for name, size in sorted(found.items()):
                yield ObjectInfo(name, size, now_s)

    def _listed(self, deadline_s: float) -> list[str]:
        if self._membership.is_closed:
            raise OSError("the engine is closed")
        host, port = self._membership.master.host, self._setup.metrics_port
        connection = http.client.HTTPConnection(host, port, timeout=max(deadline_s, 0.001))
        try:
            connection.request("GET", "/get_all_keys")
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise OSError(f"the master's page at port {port} answers {answer.status}")
            return answer.read().decode("utf-8", "replace").split()
        except (OSError, http.client.HTTPException) as error:
            where = f"the master's metrics port {port} (MOONCAKE_MASTER_METRICS_PORT)"
            raise OSError(f"{where} does not list objects: {error}") from error
        finally:
            connection.close()

    def close(self) -> None:
        """See ObjectEngine. A client with calls that hang is not closed."""
        is_idle = self._pool.close(CLOSE_S)
        self._membership.close(is_idle=is_idle)

    # ---------------------------------------------------------------- inside

    def _of_names(
        self, work: Callable[[Any, list[str]], list[Outcome]], names: Sequence[str], deadline_s: float
    ) -> list[Outcome]:
        """As ``_answers``, for calls that move no bytes."""
        ends = range(BATCH_NAMES, len(names) + BATCH_NAMES, BATCH_NAMES)
        parts = [range(end - BATCH_NAMES, min(end, len(names))) for end in ends]

        def of_part(client: Any, part: Sequence[int]) -> list[Outcome]:
            return work(client, [*names[part[0] : part[-1] + 1]])

        return self._answers(of_part, len(names), parts, None, deadline_s=deadline_s, made=_same)

    def _answers(
        self,
        work: Callable[[Any, Sequence[int]], list[T]],
        count: int,
        parts: Sequence[Sequence[int]],
        memory: Sequence[Sequence[memoryview]] | None,
        *,
        deadline_s: float,
        made: Callable[[Outcome], T],
    ) -> list[T]:
        """Calls ``work`` for each of ``parts`` of ``count`` items, in a thread each. The answers in order;
        where a part has none in time, what ``made`` makes of the reason; of NO_SPACE for items in no part.
        """
        found: list[list[T]] = [[] for _ in parts]
        ends_at_s = self._clock.now_s() + deadline_s

        def task(number: int, is_given_up: Callable[[], bool]) -> Outcome:
            client = self._membership.client(max(0.0, ends_at_s - self._clock.now_s()))
            if client is None or is_given_up():
                return Outcome.IO_ERROR
            found[number] = work(client, parts[number])
            return Outcome.OK

        targets = None
        if memory is not None:
            targets = [[piece for i in part for piece in memory[i]] for part in parts]
        outcomes = self._pool.run(task, len(parts), deadline_s=deadline_s, targets=targets)
        closed = self._membership.is_closed
        if outcomes == [Outcome.OK] and len(found[0]) == count:
            return found[0]
        answers = [made(Outcome.REJECTED if closed else Outcome.NO_SPACE)] * count
        for part, outcome, values in zip(parts, outcomes, found, strict=True):
            rest = [made(Outcome.REJECTED if closed else outcome)] * len(part)
            for i, answer in zip(part, values if outcome is Outcome.OK else rest, strict=True):
                answers[i] = answer
        return answers

    def _outcome_of(self, code: int, what: str) -> Outcome:
        if code >= 0:
            self._trouble.worked(what, "kvbm: Mooncake Store: %s work again", what)
            return Outcome.OK
        outcome = _OUTCOMES.get(code, Outcome.IO_ERROR)
        if outcome in (Outcome.IO_ERROR, Outcome.NO_SPACE):
            meaning = _MEANINGS.get(code, _OWN_LOG)
            line = "kvbm: KVBM_REMOTE_URL: Mooncake Store: %s fail with code %d: %s"
            self._trouble.failed(what, code, line, what, code, meaning)
        return outcome


def _same(outcome: Outcome) -> Outcome:
    return outcome


def _pieces_of(memory: Sequence[memoryview]) -> _Pieces:
    arrays = [np.frombuffer(piece, dtype=np.uint8) for piece in memory if piece.nbytes]
    return _Pieces([array.ctypes.data for array in arrays], [array.nbytes for array in arrays])


def _parts(names: Sequence[str], sizes: Sequence[int]) -> list[list[int]]:
    """Divides items into batches, but for those that are too large. None has a name twice: of two reads of
    one object in a batch Mooncake fills one and says OK to both.
    """
    parts, seen, num_bytes = list[list[int]](), set[str](), 0
    for i, size in enumerate(sizes):
        if size > MAX_OBJECT_BYTES:
            continue
        is_full = not parts or len(parts[-1]) == BATCH_ITEMS or num_bytes + size > BATCH_BYTES
        if is_full or names[i] in seen:
            parts.append([])
            seen, num_bytes = set(), 0
        parts[-1].append(i)
        seen.add(names[i])
        num_bytes += size
    return parts


# -------------------------------------------------------------------- the client's calls


def _get_whole(
    client: Any, items: Sequence[GetItem], pieces: Sequence[_Pieces], numbers: Sequence[int]
) -> list[int]:
    names = [items[i].name for i in numbers]
    addresses, sizes = [pieces[i].addresses for i in numbers], [pieces[i].sizes for i in numbers]
    codes: list[int] = client.batch_get_into_multi_buffers(names, addresses, sizes)
    return codes


def _get_ranges(client: Any, name: str, offset_bytes: int, pieces: _Pieces) -> int:
    """The number of bytes, or a code."""
    at, offsets = offset_bytes, list[int]()
    for size in pieces.sizes:
        offsets.append(at)
        at += size
    every = [[[size]] for size in pieces.sizes]
    starts = [[[offset]] for offset in offsets]
    zeros = [[[0]]] * len(every)
    found = client.get_into_ranges(pieces.addresses, [[name]] * len(every), zeros, starts, every)
    codes: list[int] = [code for one in found for codes in one for code in codes]
    return next((code for code in codes if code < 0), sum(codes))


def _get_around(client: Any, item: GetItem, pieces: _Pieces, size: int) -> int:
    """A part of an object, read into memory that is not registered. Mooncake reads no parts of objects there,
    so the whole object is read and the part is copied.
    """
    whole = memoryview(bytearray(size))
    (code,) = _get_whole(client, [item], [_pieces_of([whole])], [0])
    if code < 0:
        return int(code)
    at = item.offset_bytes
    end = at + pieces.num_bytes
    for piece in item.pieces:
        count = min(piece.nbytes, end - at)
        if count > 0:
            piece.cast("B")[:count] = whole[at : at + count]
            at += count
    return pieces.num_bytes


def _sizes(client: Any, names: Sequence[str]) -> dict[str, int]:
    """Sizes of the objects that the master knows, by name."""
    found: dict[str, int] = {}
    for name, replicas in client.batch_get_replica_desc(list(dict.fromkeys(names))).items():
        for replica in replicas:
            if replica.is_memory_replica():
                found[name] = replica.get_memory_descriptor().buffer_descriptor.size
                break
    return found


# -------------------------------------------------------------------- the client itself


class _Membership:
    """This engine's client. It is made in a thread of its own, as that may take minutes. Any thread."""

    def __init__(self, master: ServerUrl, setup: MooncakeSetup, trouble: TroubleLog) -> None:
        self.master = master
        self._setup = setup
        self._trouble = trouble
        self._module = _load()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._client: Any = None
        self._has_failed = False
        self._is_closed = False
        self._spans: list[tuple[int, int]] = []
        self._thread = threading.Thread(target=self._join, name="kvbm-mooncake-join", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def client(self, wait_s: float) -> Any:
        """The client. None if there is none within ``wait_s``, or the last attempt to join has failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._client is not None or self._has_failed or self._is_closed, wait_s
            )
            return self._client

    def register(self, address: int, num_bytes: int) -> None:
        """Registers memory now, or as soon as there is a client."""
        with self._changed:
            self._spans.append((address, num_bytes))
            client = self._client
        if client is not None:
            self._register(client, address, num_bytes)

    def has_registered(self, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether all of this lies in memory that was registered."""
        with self._changed:
            spans = list(self._spans)
        return all(
            any(start <= address and address + size <= start + length for start, length in spans)
            for address, size in zip(addresses, sizes, strict=True)
        )

    def _register(self, client: Any, address: int, num_bytes: int) -> None:
        if code := client.register_buffer(address, num_bytes):
            line = "kvbm: Mooncake Store: %.2f GB of host memory cannot be registered (code %d)"
            log.warning(line, num_bytes / 1e9, code)

    def _join(self) -> None:
        pause_s = JOIN_PAUSE_S
        while not self._is_closed:
            client = self._made()
            with self._changed:
                self._has_failed = client is None
                self._changed.notify_all()
                if client is None:
                    if not self._is_closed:
                        self._changed.wait(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                    continue
            self._publish(client)
            return

    def _publish(self, client: Any) -> None:
        """Registers all memory, then lets others have the client: from then on it is theirs to close."""
        num_known = 0
        while True:
            with self._changed:
                spans = self._spans[num_known:]
                is_closed = self._is_closed
                if not spans and not is_closed:
                    self._client = client
                    self._changed.notify_all()
                    return
            if is_closed:
                client.close()
                return
            for address, num_bytes in spans:
                self._register(client, address, num_bytes)
            num_known += len(spans)

    def _made(self) -> Any:
        """A client that has joined, or None."""
        setup = self._setup
        where = f"mooncake://{setup.master}"
        try:
            with socket.create_connection((self.master.host, self.master.port), timeout=PROBE_S):
                pass
            more = {} if setup.tenant == "default" else {"tenant_id": setup.tenant}
            code, errors = _rehearse(self._arguments(segment_bytes=0), more)
            if not code:
                client = self._module.MooncakeDistributedStore()
                code = client.setup(*self._arguments(setup.segment_bytes), **more)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            line = "kvbm: KVBM_REMOTE_URL: %s: %s"
            self._trouble.failed("joining", type(error).__name__, line, where, error)
            return None
        if code:
            line = "kvbm: KVBM_REMOTE_URL: %s: Mooncake cannot join (code %d): %s"
            self._trouble.failed("joining", code, line, where, code, errors or _OWN_LOG)
            return None
        self._trouble.worked("joining", "kvbm: %s: joined", where)
        given = f"{setup.segment_bytes / 1e9:g} GB" if setup.segment_bytes else "nothing"
        line = "kvbm: %s by %s; this process gives %s to the pool"
        log.log(logging.INFO, line, where, setup.protocol, given)
        return client

    def _arguments(self, segment_bytes: int) -> list[object]:
        setup = self._setup
        return [
            setup.local_hostname or own_address(self.master.host, self.master.port),
            setup.metadata_server,
            segment_bytes,
            setup.buffer_bytes,
            setup.protocol,
            setup.device,
            setup.master,
        ]

    def close(self, *, is_idle: bool) -> None:
        """``is_idle``: no call of the client is under way. Otherwise the client is kept for good."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            client, self._client = self._client, None
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        if client is None:
            return
        if is_idle:
            client.close()
        else:
            LATE.add((), client)  # with a call that has not ended it must not be destroyed


def _rehearse(arguments: Sequence[object], more: Mapping[str, str]) -> tuple[int, str]:
    """Joins in a process of its own: Mooncake's code, and the errors that it has logged. TimeoutError.

    Joining a master that accepts connections and does not answer takes Mooncake 40 s, in which no thread of
    its process runs Python.
    """
    command = [sys.executable, "-c", _REHEARSAL, json.dumps([arguments, more])]
    try:
        # The program is ours, and its arguments are no shell's.
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, timeout=REHEARSAL_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        errors = _errors_in(late.stderr or b"") or "the master accepts connections and does not answer"
        raise TimeoutError(f"Mooncake does not join within {REHEARSAL_S:g} s: {errors}") from None
    return done.returncode, _errors_in(done.stderr)


def _errors_in(log_text: bytes) -> str:
    """The first errors in Mooncake's own log: later ones follow from them."""
    found = dict.fromkeys(text.decode("utf-8", "replace") for text in _ERROR_LINE.findall(log_text))
    return "; ".join(shown(text) for text in [*found][:3])


_ERROR_LINE = re.compile(rb"^E\d{4} [\d:.]+ +\d+ \S+\] (.+)$", re.MULTILINE)
"""Of glog's."""

_REHEARSAL = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
arguments, more = json.loads(sys.argv[1])
os._exit(MooncakeDistributedStore().setup(*arguments, **more) & 255)
"""


def _load() -> Any:
    set_timeouts()
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        packages = "mooncake-transfer-engine (-non-cuda without a GPU) and the system's libibverbs1"
        raise ConfigError("KVBM_REMOTE_URL", "mooncake://", f"install {packages}: {error}") from None

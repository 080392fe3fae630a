"""What an object store may do wrong, row by row as docs/remote.md has it: what it costs, what is said."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from pydantic import SecretStr

from kvbm_core.clock import ManualClock
from kvbm_core.config.remote_url import remote_bucket
from kvbm_core.errors import Outcome
from kvbm_core.storage.late import LATE, ranges_of
from kvbm_core.storage.remote.engine import GetItem, Got, PutItem
from kvbm_core.storage.remote.s3 import CHUNK_BYTES, NUM_THREADS, OFF_S, S3Engine
from kvbm_core.storage.remote.s3_client import S3Options, store_maker
from tests.engines.certificates import make_certificates
from tests.engines.faulty_store import Fault, FaultyStore, faulty_store
from tests.engines.ports import free_port

ACCESS_KEY, SECRET_KEY = "AKIAOFTESTS", "s3cr3t/of+tests"
BUCKET = remote_bucket("s3://bucket/prefix")
CONTENT = bytes(range(250)) * 400
DEADLINE_S = 1.0
TIMEOUT_S = 1.5
DOC = Path(__file__).resolve().parents[2] / "docs" / "remote.md"
OK, MISS, IO_ERROR, TIMED_OUT = Outcome.OK, Outcome.MISS, Outcome.IO_ERROR, Outcome.TIMED_OUT
NO_SPACE, CORRUPT = Outcome.NO_SPACE, Outcome.CORRUPT


class Row(NamedTuple):
    """``said``: what the log has to say, empty: nothing. ``is_off``: it is left alone then."""

    what: str
    fault: Fault
    put: Outcome
    get: Outcome
    exists: Outcome
    said: str = ""
    is_off: bool = False


KEYS = "the credentials are wrong"
AGAIN = "it broke off its answer"
ELSEWHERE = "it is in another region or at another address"
ROWS = (
    Row("401", Fault.UNAUTHORIZED, IO_ERROR, IO_ERROR, IO_ERROR, KEYS, True),
    Row("403 AccessDenied", Fault.FORBIDDEN, IO_ERROR, IO_ERROR, IO_ERROR, "do not allow it", True),
    Row("403 InvalidAccessKeyId", Fault.BAD_KEY, IO_ERROR, IO_ERROR, IO_ERROR, KEYS, True),
    Row("403 SignatureDoesNotMatch", Fault.BAD_SIGNATURE, IO_ERROR, IO_ERROR, IO_ERROR, KEYS, True),
    Row("400 ExpiredToken", Fault.EXPIRED, IO_ERROR, IO_ERROR, IO_ERROR, "have expired", True),
    Row("403 RequestTimeTooSkewed", Fault.SKEWED, IO_ERROR, IO_ERROR, IO_ERROR, "the clock of this", True),
    Row("404 NoSuchBucket", Fault.NO_BUCKET, IO_ERROR, IO_ERROR, MISS, "there is no such bucket", True),
    Row("301: another region", Fault.MOVED, IO_ERROR, IO_ERROR, IO_ERROR, ELSEWHERE, True),
    Row("404", Fault.NOT_FOUND, MISS, MISS, MISS),
    Row("304", Fault.NOT_MODIFIED, IO_ERROR, IO_ERROR, IO_ERROR, "its answer is 304"),
    Row("412", Fault.EXISTS, OK, IO_ERROR, IO_ERROR, "its answer is 412"),
    Row("409", Fault.CONFLICT, OK, IO_ERROR, IO_ERROR, "its answer is 409"),
    Row("500", Fault.ERROR, IO_ERROR, IO_ERROR, IO_ERROR, "its answer is 500"),
    Row("503 SlowDown", Fault.SLOW_DOWN, IO_ERROR, IO_ERROR, IO_ERROR, "its answer is 503"),
    Row("503 every second time", Fault.EVERY_SECOND, OK, OK, OK),
    Row("507, or a quota", Fault.FULL, NO_SPACE, NO_SPACE, NO_SPACE, "make room"),
    Row("hangs", Fault.HANG, TIMED_OUT, TIMED_OUT, TIMED_OUT),
    Row("hangs in the head", Fault.HANG_IN_HEAD, TIMED_OUT, TIMED_OUT, TIMED_OUT),
    Row("hangs in the body", Fault.HANG_IN_BODY, OK, TIMED_OUT, OK),
    Row("trickles", Fault.TRICKLE, OK, TIMED_OUT, OK),
    Row("closes without an answer", Fault.CLOSE, IO_ERROR, IO_ERROR, IO_ERROR, AGAIN),
    Row("closes in the body", Fault.CLOSE_IN_BODY, OK, IO_ERROR, OK, AGAIN),
    Row("says more bytes than it sends", Fault.SAYS_LONGER, OK, CORRUPT, OK),
    Row("says no length", Fault.SAYS_NOTHING, OK, IO_ERROR, IO_ERROR, AGAIN),
    Row("does not end", Fault.ENDLESS, OK, IO_ERROR, IO_ERROR, AGAIN),
    Row("sends a larger object", Fault.LARGER, OK, CORRUPT, OK),
    Row("speaks no HTTP", Fault.NONSENSE, IO_ERROR, IO_ERROR, IO_ERROR, AGAIN),
)
ELSEWHERE_TESTED = {
    "says fewer bytes than there are",
    "sends other bytes",
    "redirects to another host",
    "its certificate is not known",
    "nobody listens, for a while",
}
"""Rows of the page with a test of their own."""


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_CA_BUNDLE", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def _captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


@contextmanager
def engine_of(
    store: FaultyStore, clock: ManualClock | None = None, timeout_s: float = TIMEOUT_S
) -> Iterator[S3Engine]:
    """An engine of its objects, closed afterwards."""
    options = S3Options(store.url, "us-east-1", SecretStr(ACCESS_KEY), SecretStr(SECRET_KEY))
    engine = S3Engine(store_maker(BUCKET, options), BUCKET, timeout_s, clock)
    try:
        yield engine
    finally:
        engine.close()


def put(engine: S3Engine, name: str = "a/name", deadline_s: float = DEADLINE_S) -> Outcome:
    """In two pieces."""
    pieces = [memoryview(bytearray(CONTENT[:100])), memoryview(bytearray(CONTENT[100:]))]
    return engine.put([PutItem(name, pieces)], deadline_s=deadline_s)[0]


def get(engine: S3Engine, name: str = "a/name") -> Outcome:
    """OK: with the right bytes."""
    target = memoryview(bytearray(len(CONTENT)))
    (got,) = engine.get([GetItem(name, [target[:7], target[7:]])], deadline_s=DEADLINE_S)
    assert got.outcome is not OK or (got.num_bytes == len(CONTENT) and target == CONTENT), "wrong bytes"
    return got.outcome


def exists(engine: S3Engine, name: str = "a/name") -> Outcome:
    """By a look-up."""
    return engine.exists([name], deadline_s=DEADLINE_S)[0]


def in_time(call: Callable[[S3Engine], Outcome], engine: S3Engine, waits_s: list[float]) -> Outcome:
    """Its outcome. The engine's clock stands still: a call waits until its deadline, or not at all."""
    waits_s.clear()
    outcome = call(engine)
    assert waits_s == [DEADLINE_S] or (waits_s == [] and outcome is IO_ERROR)
    return outcome


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said, in which nothing of a credential is."""
    told = [record.getMessage() for record in caplog.records]
    assert not any(key in text for text in (*told, caplog.text) for key in (ACCESS_KEY, SECRET_KEY))
    return told


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those of ``lines`` that say that something fails."""
    return [line for line in lines(caplog) if " fail: " in line]


def cells_of_the_page() -> dict[str, list[str]]:
    """The rows of the table of faults, by their first cell."""
    part = (
        DOC.read_text(encoding="utf-8")
        .partition("### What may go wrong with a bucket")[2]
        .partition("\n## ")[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "|" in line
    ]
    return {cells[0]: cells[1:] for cells in rows[2:]}


def test_the_page_has_these_rows_and_no_others() -> None:
    page = cells_of_the_page()
    assert page.keys() == {row.what for row in ROWS} | ELSEWHERE_TESTED
    for row in ROWS:
        assert page[row.what][:3] == [f"{row.put}", f"{row.get}", f"{row.exists}"], row.what
        said = page[row.what][3]
        assert said.endswith("; off") is row.is_off and (row.said in said if row.said else not said), row.what


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault.name)
def test_a_fault_costs_what_the_page_says(
    row: Row, caplog: pytest.LogCaptureFixture, waits_s: list[float]
) -> None:
    clock = ManualClock()
    with faulty_store() as store, engine_of(store, clock) as engine:
        _until(lambda: put(engine) is OK)
        store.fault = row.fault
        assert in_time(exists, engine, waits_s) is row.exists
        assert in_time(get, engine, waits_s) is row.get
        assert in_time(put, engine, waits_s) is row.put
        told = failures(caplog)
        ways = {way for way in ("reads", "writes") for line in told if f": {way} fail: " in line}
        fails = {"writes"} if row.put in (IO_ERROR, NO_SPACE) else set()
        fails |= {"reads"} if {row.get, row.exists} & {IO_ERROR, NO_SPACE} else set()
        assert ways == fails and len(told) == len(fails), told
        assert all(row.said in line for line in told), told
        for _ in range(3 if row.said else 0):
            exists(engine), get(engine), put(engine)
        assert failures(caplog) == told, "it is said once"
        store.fault = Fault.NONE
        if row.is_off:
            number = sum(store.requests.values())
            assert (exists(engine), get(engine), put(engine)) == (IO_ERROR, IO_ERROR, IO_ERROR)
            assert sum(store.requests.values()) == number, "it is left alone"
            clock.advance(OFF_S)
        _until(lambda: (exists(engine), get(engine), put(engine)) == (OK, OK, OK))
        again = {way for way in ways if any(f": {way} work again" in line for line in lines(caplog))}
        assert again == ways


def test_a_larger_object_is_not_read() -> None:
    size = 3 * CHUNK_BYTES
    with faulty_store() as store, engine_of(store, timeout_s=30.0) as engine:
        item = PutItem("a", [memoryview(b"x" * size)])
        assert engine.put([item], deadline_s=30.0) == [OK]
        store.fault, store.only = Fault.LARGER, "GET"
        target = memoryview(bytearray(size))
        assert engine.get([GetItem("a", [target])], deadline_s=30.0) == [Got(CORRUPT)]
        assert target == bytes(size), "not even its beginning"
        assert store.bytes_sent < 32 << 20, "the server has 64 MiB to send; sockets hold some of it"


def test_what_lies_about_its_length_is_told_as_that_long() -> None:
    with faulty_store() as store, engine_of(store) as engine:
        assert put(engine) is OK
        store.fault = Fault.SAYS_SHORTER
        target = memoryview(bytearray(len(CONTENT)))
        got = engine.get([GetItem("a/name", [target])], deadline_s=DEADLINE_S)
        assert got == [Got(OK, len(CONTENT) - 10)], "whoever reads records knows their length"
        store.fault = Fault.OTHER_BODY
        got = engine.get([GetItem("a/name", [target])], deadline_s=DEADLINE_S)
        assert got == [Got(OK, len(CONTENT))], "whoever reads records checks them"


def test_a_redirect_takes_no_bytes_and_no_credentials_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    with faulty_store() as other, faulty_store() as store, engine_of(store) as engine:
        store.other_url = other.url
        store.fault = Fault.REDIRECT
        other.objects["/bucket/prefix/a/name"] = CONTENT
        assert put(engine) is IO_ERROR and not other.requests["PUT"]
        assert get(engine) is OK, "records are checked wherever they are from"
        assert all("authorization" not in headers for headers in other.headers)
        assert [ELSEWHERE in line for line in lines(caplog)] == [True]


def test_an_unknown_certificate_is_refused_and_an_own_authority_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_certificates(tmp_path)
    with faulty_store(paths.certificate, paths.key) as store:
        with engine_of(store) as engine:
            assert [put(engine), get(engine)] == [IO_ERROR, IO_ERROR]
            told = lines(caplog)
            assert len(told) == 2 and all("AWS_CA_BUNDLE" in line and "left alone" in line for line in told)
            assert not store.headers, "nothing was sent to it"
        monkeypatch.setenv("AWS_CA_BUNDLE", str(paths.authority))
        with engine_of(store) as engine:
            assert [put(engine), get(engine), exists(engine)] == [OK, OK, OK]
        digests = {
            headers["x-amz-content-sha256"] for headers in store.headers if "content-length" in headers
        }
        assert "UNSIGNED-PAYLOAD" in digests, "TLS protects the bytes"


def test_over_plain_http_the_bytes_are_signed() -> None:
    with faulty_store() as store, engine_of(store) as engine:
        assert put(engine) is OK
        assert re.fullmatch("[0-9a-f]{64}", store.headers[0]["x-amz-content-sha256"])


def test_a_server_that_is_gone_is_used_again_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    with faulty_store() as store, engine_of(store) as engine:
        assert put(engine) is OK
        port = int(store.url.rpartition(":")[2])
        store.close()
        assert [put(engine), get(engine), exists(engine)] == [IO_ERROR, IO_ERROR, IO_ERROR]
        assert all("nobody listens" in line or "broke off" in line for line in lines(caplog))
        with faulty_store(port=port) as back:
            assert [put(engine), get(engine), exists(engine)] == [OK, OK, OK]
            assert back.requests["PUT"] == 1
        assert sum("work again" in line for line in lines(caplog)) == 2


def test_a_proxy_that_does_not_listen_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the store, which does."""
    for name in (
        "NO_PROXY",
        "no_proxy",
        "HTTPS_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
        "http_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    with faulty_store() as store, engine_of(store) as engine:
        assert put(engine) is IO_ERROR
        (line,) = lines(caplog)
        assert "nobody listens at the proxy that HTTP_PROXY names" in line


def test_many_pieces_are_one_request() -> None:
    """obstore sends what is made of pieces in parts, three requests at least, unless it is told not to."""
    content = bytes(12 << 20)
    pieces = [memoryview(content)[at : at + (1 << 20)] for at in range(0, len(content), 1 << 20)]
    with faulty_store() as store, engine_of(store, timeout_s=30.0) as engine:
        assert engine.put([PutItem("large", pieces)], deadline_s=30.0) == [OK]
        assert store.requests == {"PUT": 1} and store.objects["/bucket/prefix/large"] == content


def test_memory_of_a_put_that_was_given_up_is_held_until_nobody_reads_it() -> None:
    memory = memoryview(bytearray(CONTENT))
    with faulty_store() as store, engine_of(store) as engine:
        store.fault = Fault.HANG
        assert engine.put([PutItem("a", [memory[:9], memory[9:]])], deadline_s=0.1) == [TIMED_OUT]
        assert LATE.holds(ranges_of(memory)) and LATE.holds(ranges_of([memory[50:60]]))
        assert not LATE.holds(ranges_of(memoryview(bytearray(10))))
        _until(lambda: not LATE.holds(ranges_of(memory)))


def test_nothing_is_written_to_memory_of_a_get_that_has_returned() -> None:
    target = memoryview(bytearray(len(CONTENT)))
    with faulty_store() as store, engine_of(store, timeout_s=30.0) as engine:
        assert put(engine) is OK
        store.fault = Fault.HANG_IN_BODY
        (got,) = engine.get([GetItem("a/name", [target])], deadline_s=0.3)
        assert got == Got(TIMED_OUT) and not LATE.holds(ranges_of(target))
        target[:] = bytes(len(CONTENT))
        store.is_over.set()  # the rest is sent now
        _until(lambda: engine._readers.stuck_threads == 0)
        assert target == bytes(len(CONTENT))


def test_when_all_threads_hang_calls_end_at_once_and_it_serves_again() -> None:
    with faulty_store() as store, engine_of(store) as engine:
        assert put(engine) is OK
        store.fault = Fault.HANG
        names = [str(number) for number in range(2 * NUM_THREADS)]
        assert engine.exists(names, deadline_s=0.1) == [TIMED_OUT] * len(names)
        while engine._readers.stuck_threads < NUM_THREADS:  # some had not begun when the call gave up
            engine.exists(names, deadline_s=0.1)
        assert get(engine) is Outcome.BUSY
        store.fault = Fault.NONE
        assert put(engine) is OK, "writes have threads of their own"
        _until(lambda: get(engine) is OK)


def test_keys_that_may_only_read_read() -> None:
    with faulty_store() as store, engine_of(store) as engine:
        assert put(engine) is OK
        store.fault, store.only = Fault.FORBIDDEN, "PUT"
        assert [put(engine), get(engine), put(engine), exists(engine)] == [IO_ERROR, OK, IO_ERROR, OK]
        assert store.requests["PUT"] == 2


def test_a_look_up_that_is_refused_is_asked_why_once(caplog: pytest.LogCaptureFixture) -> None:
    """An answer to HEAD has no body, so that it does not say what is wrong."""
    with faulty_store() as store, engine_of(store) as engine:
        store.fault = Fault.SKEWED
        for _ in range(3):
            assert exists(engine) is IO_ERROR
        assert store.requests == {"HEAD": 1, "GET": 1}
        assert ["the clock of this machine" in line for line in lines(caplog)] == [True]


def test_an_archived_object_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_answers(), Fault.FORBIDDEN, (403, "InvalidObjectState"))
    with faulty_store() as store, engine_of(store) as engine:
        store.fault = Fault.FORBIDDEN
        assert [get(engine), get(engine)] == [MISS, MISS]
        store.fault = Fault.NONE
        assert put(engine) is OK, "it is no reason to leave the store alone"


def test_a_listing_that_fails_says_why_in_a_line() -> None:
    with faulty_store() as store, engine_of(store) as engine:
        store.fault = Fault.FORBIDDEN
        with pytest.raises(OSError, match="s3://bucket/prefix cannot be listed: 403 AccessDenied") as raised:
            list(engine.scan("", deadline_s=DEADLINE_S))
        assert ACCESS_KEY not in str(raised.value) and raised.value.__cause__ is None
        store.fault = Fault.HANG
        with pytest.raises(OSError, match="no answer in time"):
            list(engine.scan("", deadline_s=DEADLINE_S))


def test_nothing_that_is_shown_of_an_engine_has_its_keys() -> None:
    with faulty_store() as store, engine_of(store) as engine:
        options = S3Options(store.url, None, SecretStr(ACCESS_KEY), SecretStr(SECRET_KEY))
        shown = f"{engine!r} {options!r} {options} {engine._store!r}"
        assert SECRET_KEY not in shown and ACCESS_KEY not in shown


def _answers() -> dict[Fault, tuple[int, str]]:
    from tests.engines import faulty_store as module

    return module.ANSWERS


def _until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < end_s, "it never came to be"
        time.sleep(0.02)

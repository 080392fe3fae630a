"""A session with a real etcd: what it does when etcd stops, stands still, comes back empty, or was never
there.
"""

from __future__ import annotations

import gc
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.fleet import session as sessions
from kvbm_core.fleet.etcd import EtcdOptions, open_client
from kvbm_core.fleet.session import EtcdSession
from tests.engines.certificates import make_certificates
from tests.engines.etcd_server import EtcdServer, find_etcd
from tests.engines.ports import HOST, free_port

pytestmark = pytest.mark.etcd

LONG_S = 120.0
LEASE_S = 2.0
ROOT = "/kvbm/v1/test/"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other faster than for users."""
    monkeypatch.setattr(sessions, "RETRY_S", 0.3)
    monkeypatch.setattr(sessions, "LOOK_EVERY_S", 0.1)


class Follower:
    """Looks for records, and lets a test wait for what it finds."""

    def __init__(self, session: EtcdSession, name: str, **options: bool) -> None:
        self.seen: list[dict[str, bytes]] = []
        self._news = threading.Condition()
        session.look_for(name, self._take, **options)

    def _take(self, found: dict[str, bytes]) -> bool:
        with self._news:
            self.seen.append(found)
            self._news.notify_all()
        return True

    def wait(self, found: dict[str, bytes]) -> None:
        with self._news:
            assert self._news.wait_for(lambda: bool(self.seen) and self.seen[-1] == found, LONG_S), self.seen


@contextmanager
def session_with(options: EtcdOptions) -> Iterator[EtcdSession]:
    with closing(EtcdSession(options, ROOT)) as session:
        yield session


def wait_for(holds: Callable[[], bool]) -> None:
    ends_at_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < ends_at_s
        time.sleep(0.02)


def stay(etcd: EtcdServer, *names: str) -> bool:
    """Whether there are these records, the same ones for longer than a lease. A machine that stands still
    loses a lease too: ask again.
    """
    before = etcd.revisions()
    if sorted(before) != sorted(names):
        return False
    time.sleep(1.5 * LEASE_S)
    return etcd.revisions() == before


def lines_about_etcd(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("kvbm: etcd")]


def test_what_one_tells_the_other_finds_until_it_closes(etcd: EtcdServer) -> None:
    with session_with(etcd.options()) as one, session_with(etcd.options(lease_s=600)) as two:
        found, all_found = Follower(one, "leader/a"), Follower(one, "rank/a/", keep_looking=True)
        two.tell("leader/a", b"here")
        two.tell("rank/a/1", b"1")
        found.wait({"leader/a": b"here"})
        all_found.wait({"rank/a/1": b"1"})
        two.tell("rank/a/1", b"moved")
        all_found.wait({"rank/a/1": b"moved"})
        two.close()
        all_found.wait({})
        wait_for(lambda: not etcd.names())  # long before its lease is over
        assert found.seen == [{"leader/a": b"here"}], "what is known goes on"


@pytest.mark.shows("KVBM_FLEET_LEASE_S", "ETCD_ENDPOINTS")
def test_a_lease_is_as_long_as_the_setting_says(etcd: EtcdServer) -> None:
    given = KvbmSettings.from_env({"etcd_endpoints": etcd.url, "fleet_lease_s": 7})
    options = EtcdOptions.from_settings(given)
    assert options is not None
    with session_with(options) as session, closing(etcd.client()) as client:
        session.tell("leader/a", b"here")
        wait_for(lambda: etcd.names() == [f"{ROOT}leader/a"])
        _, about = client.get(f"{ROOT}leader/a")
        assert client.get_lease_info(about.lease_id).grantedTTL == 7


@pytest.mark.shows("KVBM_FLEET_LEASE_S")
def test_the_records_of_a_process_that_is_killed_end_with_its_lease(etcd: EtcdServer) -> None:
    program = (
        "import sys, time\n"
        "from kvbm_core.fleet.etcd import EtcdOptions\n"
        "from kvbm_core.fleet.session import EtcdSession\n"
        f"session = EtcdSession(EtcdOptions((('{HOST}', {etcd.port}),), lease_s={LEASE_S}), {ROOT!r})\n"
        "session.tell('rank/a/0', b'x')\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for(lambda: etcd.names() == [f"{ROOT}rank/a/0"])
        wait_for(lambda: stay(etcd, f"{ROOT}rank/a/0"))
    finally:
        process.kill()
        process.wait(10)
    wait_for(lambda: not etcd.names())


def restart(etcd: EtcdServer) -> None:
    etcd.stop()
    time.sleep(3)  # longer than the lease
    etcd.start()


def restart_empty(etcd: EtcdServer) -> None:
    etcd.stop()
    etcd.lose_all()
    etcd.start()


def freeze(etcd: EtcdServer) -> None:
    etcd.freeze()
    time.sleep(4)
    etcd.thaw()


@pytest.mark.parametrize("fail", [restart, restart_empty, freeze])
def test_after_a_failure_of_etcd_all_is_there_again(
    etcd: EtcdServer, fail: Callable[[EtcdServer], None], caplog: pytest.LogCaptureFixture
) -> None:
    with session_with(etcd.options()) as one, session_with(etcd.options()) as two:
        one.tell("leader/a", b"here")
        found = Follower(two, "leader/a")
        found.wait({"leader/a": b"here"})
        fail(etcd)
        late = Follower(two, "leader/b")
        one.tell("leader/b", b"new")
        late.wait({"leader/b": b"new"})
        wait_for(lambda: stay(etcd, f"{ROOT}leader/a", f"{ROOT}leader/b"))
        assert found.seen == [{"leader/a": b"here"}], "nobody was told that the leader had gone"

        def is_told() -> bool:
            lines = lines_about_etcd(caplog)
            return sum("is away" in line for line in lines) == lines.count("kvbm: etcd is back") >= 2

        wait_for(is_told)


def test_without_etcd_at_start_one_line_and_all_is_met_when_it_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    etcd = EtcdServer(tmp_path)
    etcd.port = free_port()
    with session_with(etcd.options()) as one, session_with(etcd.options()) as two:
        one.tell("leader/a", b"here")
        found = Follower(two, "leader/a")
        wait_for(lambda: one.attempts_total >= 4 and two.attempts_total >= 4)
        lines = lines_about_etcd(caplog)
        assert len(lines) == 2 and all(f"{HOST}:{etcd.port} is away" in line for line in lines), lines
        assert not one.is_there
        with etcd:
            etcd.stop()
            etcd.start(etcd.port)
            found.wait({"leader/a": b"here"})
            wait_for(lambda: one.is_there and two.is_there)
            one.close()
            two.close()


@contextmanager
def counting_server(answer: bytes) -> Iterator[tuple[int, list[float]]]:
    """Port, and when somebody connected: each connection gets ``answer`` and is closed."""
    times: list[float] = []
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            times.append(time.monotonic())
            with connection:
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1], times
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        pytest.param(
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            marks=pytest.mark.nightly("five seconds; another is always tried"),
        ),
        pytest.param(b"\0" * 100, marks=pytest.mark.nightly("five seconds; another is always tried")),
    ],
    ids=["nothing", "HTTP", "zeros"],
)
def test_somebody_else_at_its_port_is_not_asked_in_a_loop(
    answer: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "RETRY_S", 3.0)  # as for users
    with counting_server(answer) as (port, times), session_with(EtcdOptions(((HOST, port),))) as session:
        session.tell("leader/a", b"here")
        wait_for(lambda: len(times) >= 2)
        assert times[1] - times[0] >= 2.0
        time.sleep(1.0)
        assert len(times) <= 3, "20 a minute"
        for _ in range(100):
            session.tell("leader/a", b"there")  # no reason to hurry either
        assert session.attempts_total <= 2
    assert len(lines_about_etcd(caplog)) == 1


def test_other_servers_are_tried(etcd: EtcdServer) -> None:
    servers = ((HOST, free_port()), (HOST, etcd.port))
    with session_with(EtcdOptions(servers, lease_s=LEASE_S)) as session:
        wait_for(lambda: session.is_there)


def test_two_leaders_of_one_name(etcd: EtcdServer) -> None:
    rivals: list[bytes] = []
    with session_with(etcd.options()) as one, session_with(etcd.options()) as two:
        one.tell("leader/a", b"first", rivals.append)
        wait_for(lambda: bool(etcd.names()))
        two.tell("leader/a", b"second", rivals.append)
        wait_for(lambda: bool(rivals))
        assert set(rivals) == {b"first"}
        found = Follower(two, "leader/a")
        found.wait({"leader/a": b"first"})
        one.close()
        found.wait({"leader/a": b"second"})


def test_what_is_removed_or_overwritten_by_others_is_there_again(etcd: EtcdServer) -> None:
    """Its lease lives on."""
    rivals: list[bytes] = []
    with session_with(etcd.options()) as session, closing(etcd.client()) as other:
        session.tell("leader/a", b"here", rivals.append)
        session.tell("rank/a/0", b"here too")
        names = [f"{ROOT}leader/a", f"{ROOT}rank/a/0"]
        wait_for(lambda: sorted(etcd.names()) == names)
        other.delete_prefix(ROOT)
        wait_for(lambda: sorted(etcd.names()) == names)
        for name in names:
            other.put(name, b"somebody else's")
        wait_for(lambda: other.get(names[1])[0] == b"here too" and bool(rivals))
        assert other.get(names[0])[0] == b"somebody else's" == rivals[0]
        other.delete(names[0])
        wait_for(lambda: other.get(names[0])[0] == b"here")
        assert session.attempts_total == 1


def test_an_etcd_that_is_late_is_asked_more_and_more_seldom() -> None:
    """It may be that a fleet asks for more than it can do; one that is not there costs nobody anything."""
    with socket.create_server((HOST, 0)) as silent:
        late = EtcdOptions(((HOST, silent.getsockname()[1]),), lease_s=0.9)
        absent = EtcdOptions(((HOST, free_port()),), lease_s=0.9)
        with session_with(late) as one, session_with(absent) as two:
            wait_for(lambda: two.attempts_total > 12)
            assert 2 <= one.attempts_total <= 8


def calls(etcd: EtcdServer, method: str) -> int:
    """That have reached the server."""
    told = httpx.get(f"{etcd.url}/metrics", trust_env=False).text
    (count,) = re.findall(rf'^grpc_server_started_total\{{grpc_method="{method}",.*\}} (\S+)$', told, re.M)
    return int(count)


def test_who_waits_for_a_name_writes_nothing(etcd: EtcdServer) -> None:
    """A fleet that is restarted waits for the leases of its earlier life; etcd writes only at their end."""
    rivals: list[bytes] = []
    with session_with(etcd.options()) as one, session_with(etcd.options(lease_s=600)) as two:
        one.tell("leader/a", b"first", rivals.append)
        wait_for(lambda: bool(etcd.names()))
        two.tell("leader/a", b"second", rivals.append)
        wait_for(lambda: len(rivals) > 1)
        before, asked = {name: calls(etcd, name) for name in ("Put", "Txn", "Range")}, len(rivals)
        wait_for(lambda: len(rivals) > asked + 3)
        made = {name: calls(etcd, name) - count for name, count in before.items()}
    assert made["Put"] == made["Txn"] == 0 < made["Range"]


def test_a_lone_record_is_there_again_after_a_new_session(etcd: EtcdServer) -> None:
    """Its own, of the session before, is not a rival's."""
    rivals: list[bytes] = []
    with session_with(etcd.options(lease_s=30.0)) as one:
        one.tell("leader/a", b"first", rivals.append)
        wait_for(lambda: bool(etcd.names()))
        attempts = one.attempts_total
        etcd.stop()
        one.tell("rank/a/0", b"makes it look")
        wait_for(lambda: one.attempts_total > attempts)
        etcd.start()
        wait_for(lambda: len(etcd.names()) == 2)
    assert rivals == []


@pytest.mark.shows("ETCD_ENDPOINTS", "ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY")
def test_tls_and_client_certificates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificates = make_certificates(tmp_path)
    given = {
        "etcd_auth_ca": str(certificates.authority),
        "etcd_auth_client_cert": str(certificates.certificate),
        "etcd_auth_client_key": str(certificates.key),
    }
    (tmp_path / "other").mkdir()
    other = make_certificates(tmp_path / "other")
    with EtcdServer(tmp_path, certificates) as etcd:
        options = EtcdOptions.from_settings(KvbmSettings.from_env({"etcd_endpoints": etcd.url, **given}))
        assert options is not None
        with session_with(options) as session:
            wait_for(lambda: session.is_there)
        wrong: list[dict[str, Any]] = [
            {"cert_file": "", "key_file": ""},
            {"cert_file": str(other.certificate), "key_file": str(other.key)},
            {"ca_file": str(other.authority)},
            {"is_tls": False},
        ]
        for changes in wrong:
            with session_with(etcd.options(**changes)) as session:
                wait_for(lambda session=session: session.attempts_total >= 2)  # type: ignore[misc]
                assert not session.is_there
    assert sum("is away" in line for line in lines_about_etcd(caplog)) == len(wrong)


def test_a_password_is_shown_again_to_an_etcd_that_was_restarted(
    etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tokens die with it, but for what it plays back of its last moments."""
    etcdctl = find_etcd("etcdctl")
    if etcdctl is None:
        pytest.skip("NOT RUN: etcdctl is not there")
    commands = ["user add root:secret", "user grant-role root root", "auth enable"]
    for command in commands:
        subprocess.run([etcdctl, "--endpoints", etcd.url, *command.split()], check=True, capture_output=True)
    options = etcd.options(lease_s=15.0, username="root", password="secret")

    def is_kept(name: str) -> bool:
        with closing(open_client(options, 0)) as client:
            return bool(client.get(ROOT + name)[0])

    with session_with(options) as session:
        wait_for(lambda: session.is_there)
        for number in range(5):
            etcd.stop()
            etcd.start()
            session.tell(f"rank/a/{number}", b"here")
            wait_for(partial(is_kept, f"rank/a/{number}"))
            if session.attempts_total > 1:
                break
        assert session.attempts_total > 1
    with session_with(etcd.options(lease_s=15.0, username="root", password="wrong")) as session:
        wait_for(lambda: session.attempts_total >= 2)
        assert not session.is_there
    assert "secret" not in caplog.text and "wrong" not in caplog.text


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_does_not_grow_while_etcd_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "RETRY_S", 0.005)
    with session_with(EtcdOptions(((HOST, free_port()),), lease_s=LEASE_S)) as session:
        session.tell("leader/a", b"here")
        wait_for(lambda: session.attempts_total >= 50)
        gc.collect()
        before = rss_bytes()
        wait_for(lambda: session.attempts_total >= 450)  # of 20 a minute
        gc.collect()
        assert rss_bytes() - before < 5e6


def test_a_bug_in_a_callback_is_not_etcds(etcd: EtcdServer, caplog: pytest.LogCaptureFixture) -> None:
    with session_with(etcd.options()) as session:
        session.tell("leader/a", b"here")
        session.look_for("leader/a", lambda found: bool(1 / 0))
        found = Follower(session, "leader/a")
        found.wait({"leader/a": b"here"})
        assert session.is_there and session.attempts_total == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]

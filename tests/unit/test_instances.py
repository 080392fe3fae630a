"""``kvbm status`` and ``kvbm top`` of real pages and sockets: who is found, what is shown, at any width."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvbm_core.cli.changes import Change, age_words
from kvbm_core.cli.instances import Reading, Sought, page_url
from kvbm_core.cli.main import app
from kvbm_core.cli.status import StatusError, parse_samples
from kvbm_core.cli.top import Watch, view
from kvbm_core.config import KvbmSettings
from kvbm_core.config.addresses import is_loopback
from kvbm_core.control.desk import About, AtOnce
from kvbm_core.control.listed import listed
from kvbm_core.control.messages import Order, Verb
from kvbm_core.control.pages import Page, PageNote, pages, targets
from kvbm_core.control.place import private_place
from kvbm_core.fleet.etcd import EtcdOptions
from kvbm_core.fleet.meeting import own_address
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.assembly import control_service, metrics_server
from kvbm_core.types import Tier
from tests.engines.etcd_server import EtcdServer
from tests.engines.ports import free_port, free_ports
from tests.unit.control_bench import here, wait_for  # noqa: F401 - here: a fixture

PATIENCE_S = 60.0
MODEL = "an-organization/A-Model-With-A-Long-Name-Instruct-2507"
pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting from outside."""
    for variable in KvbmSettings.env_names().values():
        monkeypatch.delenv(variable, raising=False)


@contextmanager
def engine(name: str, rank: int = 0, *, port: int = 0, control: str = "off") -> Iterator[Metrics]:
    """An instance as adapters set it up; ``port``: of its page, of rank 0; 0: none."""
    values = {"cpu_cache_gb": 1, "instance": name, "control": control, "metrics": bool(port)}
    settings = KvbmSettings.from_env({**values, **({"metrics_port": port} if port else {})})
    metrics, about = Metrics(), About("an engine", MODEL, rank)
    served = metrics_server(settings, metrics, about)
    assert (served is not None) == bool(port)
    cache = AtOnce(lambda: frozenset({Tier.HOST}), lambda tiers: True)
    service = control_service(settings, about, cache, metrics)
    try:
        yield metrics
    finally:
        if service is not None:
            service.close()
        if served is not None:
            served.close()


def busy(metrics: Metrics) -> None:
    """Something of everything."""
    metrics.matched_tokens(3000, disk_tokens=1000)
    metrics.request_hits(3, 1, 5)
    metrics.ttft_saved(2.5)
    metrics.tier_transfer(Tier.HOST, Tier.DEVICE, 5_000_000, 0.001)
    metrics.tier_transfer(Tier.DISK, Tier.HOST, 7_000_000, 0.02)
    metrics.tier_usage(Tier.HOST, 900, 1000)
    metrics.tier_usage(Tier.DISK, 90_000, 1_000_000)
    metrics.waiting_blocks(Tier.DISK, 170)
    metrics.set_pending_jobs(3)
    metrics.set_live_leases(2)
    metrics.evicted(Tier.HOST, 20, ages_s=np.full(20, 200.0, np.float32))
    metrics.failure("onboard_timed_out", 2)


@pytest.fixture
def three() -> Iterator[dict[str, Metrics]]:
    """Two ranks with pages, and an instance that has a private socket alone."""
    port = free_ports(2)
    with (
        engine("blue", 0, port=port) as first,
        engine("blue", 1, port=port) as second,
        engine("green", control="socket") as third,
    ):
        yield {"blue.0": first, "blue.1": second, "green.0": third}


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status and what was written."""
    done = CliRunner().invoke(app, list(arguments), env={"NO_COLOR": "1", "COLUMNS": "120"})
    return done.exit_code, done.stdout, done.stderr


# ---------------------------------------------------------------- who is found


def test_all_ranks_and_instances_of_the_machine_are_found(three: dict[str, Metrics]) -> None:
    three["blue.1"].matched_tokens(64)
    three["green.0"].matched_tokens(32)
    found = Sought().read()
    assert [one.name for one in found] == list(three) and not any(one.trouble for one in found)
    tokens = {one.name: one.samples["kvbm_matched_tokens"][0][1] for one in found}
    assert tokens == {"blue.0": 0, "blue.1": 64, "green.0": 32}
    assert [one.where == "socket" for one in found] == [False, False, True]
    assert {tuple(sorted(one.about.items()))[:2] for one in found} == {
        (("engine", "an engine"), ("model", MODEL))
    }


def test_one_instance_or_rank_can_be_named(three: dict[str, Metrics]) -> None:
    assert [one.name for one in Sought(instance="blue").read()] == ["blue.0", "blue.1"]
    assert [one.name for one in Sought(instance="blue.1").read()] == ["blue.1"]
    code, _, error = run("status", "--instance", "red")
    assert (code, error) == (
        1,
        "kvbm status: --instance red is not there; there are: blue.0, blue.1, green.0\n",
    )


def test_an_instance_with_a_page_and_a_socket_is_there_once() -> None:
    with engine("both", port=free_ports(1), control="socket"):
        assert [one.name for one in Sought().read()] == ["both.0"]


def test_without_anybody_the_shells_settings_say_whom_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports(1)
    monkeypatch.setenv("DYN_KVBM_METRICS_PORT", str(port))
    code, out, error = run("status")
    assert (code, out) == (1, "") and error.count("\n") == 1
    assert f"http://127.0.0.1:{port}/metrics" in error and "DYN_KVBM_METRICS=true" in error
    with engine("away", port=port):
        for path in private_place().iterdir():  # as if it were another user's
            path.unlink()
        assert [one.name for one in Sought().read()] == ["away.0"]


def test_pages_by_url(three: dict[str, Metrics]) -> None:
    first, second, _ = Sought().read()
    urls = [one.where.removesuffix("/metrics") for one in (first, second)]
    assert [one.name for one in Sought(tuple(urls)).read()] == ["blue.0", "blue.1"]
    port = urls[0].rpartition(":")[2]
    gone = free_ports(1)
    found = Sought((port, f"127.0.0.1:{gone}")).read()
    assert [bool(one.trouble) for one in found] == [True, False]  # by name: an address, and blue.0
    code, out, _ = run("status", port, str(gone))
    assert code == 0 and f"cannot read http://127.0.0.1:{gone}/metrics" in out and "blue.0" in out


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("6881", "http://127.0.0.1:6881/metrics"),
        ("node-1", "http://node-1:6880/metrics"),
        ("node-1:7000", "http://node-1:7000/metrics"),
        ("http://[::1]:7000/", "http://[::1]:7000/metrics"),
        ("https://gate/kvbm/metrics", "https://gate/kvbm/metrics"),
    ],
)
def test_what_a_page_is_called(text: str, url: str) -> None:
    assert page_url(text) == url


@pytest.mark.parametrize("text", ["ftp://host", "http://", "http://host:99999", "", "http://host:0"])
def test_what_is_no_page_is_one_line(text: str) -> None:
    with pytest.raises(StatusError, match="write http://HOST:PORT"):
        page_url(text)


def test_a_page_that_is_not_kvbms_is_said_to_be_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1", "-d", str(tmp_path)]
    (tmp_path / "metrics").write_text("go_goroutines 7\n")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().split(" port ")[1].split()[0]
            code, out, error = run("top", port, "--once")
        finally:
            server.terminate()
    assert (code, out) == (1, "") and f"http://127.0.0.1:{port}/metrics is not kvbm's" in error


# ---------------------------------------------------------------- notes and targets


def test_who_was_killed_is_not_found_and_its_note_goes(three: dict[str, Metrics]) -> None:
    code = (
        "import sys; from kvbm_core.control.pages import Page, PageNote;"
        "note = PageNote(Page(host='127.0.0.1', port=7, about={'name': 'lost', 'rank': '0'}));"
        "print('noted', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"noted\n"
        assert [page.name for page in pages()] == ["blue.0", "blue.1", "lost.0"]
        process.kill()
    assert [page.name for page in pages()] == ["blue.0", "blue.1"]
    assert not list(private_place().glob("lost*"))


def test_what_is_no_note_is_passed_over() -> None:
    with closing_note(PageNote(Page(host="0.0.0.0", port=6880, about={"name": "n", "rank": "0"}))):
        (path,) = private_place().glob("*.page")
        for number, text in enumerate((b"", b"{}", b"\xff", b"[1]", b"x" * 10_000)):
            path.with_name(f"bad{number}.page").write_bytes(text)
        assert [page.name for page in pages()] == ["n.0"]


@contextmanager
def closing_note(note: PageNote) -> Iterator[PageNote]:
    """Closed twice, which must not matter."""
    with closing(note), closing(note):
        yield note


def test_a_place_that_others_can_enter_is_refused_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    private_place().mkdir(mode=0o755)
    with engine("open", port=free_ports(1)):
        assert "kvbm status and top will not find this engine" in caplog.text
        assert pages() == []


@pytest.mark.parametrize(
    ("asked", "address"),
    [
        ("host.docker.internal:6880", "host.docker.internal:6880"),
        ("node-1", "node-1:6880"),
        ("[fe80::1]:6880", "[fe80::1]:6880"),
        ('bad"host:1', "127.0.0.1:6880"),
        ("", "127.0.0.1:6880"),
    ],
)
def test_targets_are_named_as_the_question_named_this_one(asked: str, address: str) -> None:
    about = {"name": "n", "rank": "0", "model": "m"}
    with (
        closing(PageNote(Page(host="0.0.0.0", port=6880, about=about))),
        closing(PageNote(Page(host="::1", port=6881, about={**about, "rank": "1"}))),
    ):
        first, second = json.loads(targets(asked))
    assert (first["targets"], second["targets"]) == ([address], ["[::1]:6881"])
    assert first["labels"] == {f"__meta_kvbm_{label}": value for label, value in about.items()}


def test_each_page_lists_all(three: dict[str, Metrics]) -> None:
    first, *_ = Sought().read()
    with urllib.request.urlopen(first.where.replace("/metrics", "/targets"), timeout=30) as answer:
        assert answer.headers["Content-Type"] == "application/json"
        listed = json.load(answer)
    assert [one["labels"]["__meta_kvbm_rank"] for one in listed] == ["0", "1"]


# ---------------------------------------------------------------- what is shown


@dataclass
class At:
    """A reading at a time of the test's own."""

    metrics: Metrics
    name: str = "blue.0"

    def read(self, at_s: float) -> Reading:
        """As it is now."""
        return Reading(self.name, "page", parse_samples(self.metrics.exposition()), read_at_s=at_s)


def test_rates_are_those_between_two_looks_and_a_restart_does_not_make_them_negative() -> None:
    at = At(Metrics())
    busy(at.metrics)
    before = at.read(100.0)
    assert Change(before).rate("kvbm_matched_tokens") == 0.0, "one look says nothing of rates"
    busy(at.metrics)
    after = at.read(104.0)
    change = Change(after, before)
    assert change.rate("kvbm_matched_tokens") == 750.0
    assert change.rate("kvbm_hit_tokens_total", tier="disk") == 250.0
    assert change.rate("kvbm_tier_transfer_bytes_total", **{"from": "disk", "to": "host"}) == 1_750_000.0
    assert change.rate("kvbm_evicted_blocks_total", tier="host", reason="room") == 5.0
    assert change.median("kvbm_evicted_age_seconds", tier="host") == 300.0
    assert change.median("kvbm_evicted_age_seconds", tier="disk") is None
    fresh = At(Metrics())
    busy(fresh.metrics)
    assert Change(fresh.read(106.0), after).rate("kvbm_matched_tokens") == 1500.0
    assert Change(replace(after, read_at_s=104.0), after).rate("kvbm_matched_tokens") == 0.0


@pytest.mark.parametrize(
    ("age_s", "words"),
    [
        (None, ""),
        (5.0, "under 5 s"),
        (300.0, "under 5 min"),
        (86_400.0, "under 1 d"),
        (float("inf"), "over a week"),
    ],
)
def test_ages_for_people(age_s: float | None, words: str) -> None:
    assert age_words(age_s) == words


def shown_at(changes: list[Change], width: int) -> str:
    """As on a terminal of so many columns."""
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(view(changes, width))
    return capture.get()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_top_is_readable_at_any_width_and_cuts_no_name(width: int) -> None:
    watch, first, second = Watch(), At(Metrics(), "blue.0"), At(Metrics(), f"{'long-name-' * 3}.1")
    for at in (first, second):
        at.metrics.describe(engine="an engine", model=MODEL, name=at.name[:-2], rank=0, version="1")
        busy(at.metrics)
    assert not watch.since([first.read(0.0), second.read(0.0)])[0].before
    busy(first.metrics)
    text = shown_at(watch.since([first.read(2.0), second.read(2.0)]), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width and "…" not in text
    joined = "".join(text.split())
    for words in (first.name, "host 60 %", "disk 20 %", "1,500", "host 90 %", "to disk 170"):
        assert all(word in joined for word in words.split()), words
    for words in ("host to device", "2.5 MB/s", "20 ms for 7 MB", "room", "onboard_timed_out", "6"):
        assert words.replace(" ", "") in joined or all(word in text for word in words.split()), words
    assert "5min" in joined and "…" not in joined
    assert (MODEL in text) == (width >= 100)
    beside = any(all(title in line for title in ("moved", "evicted", "trouble")) for line in lines)
    assert beside == (width == 200)


def test_an_idle_engine_says_that_nothing_has_happened() -> None:
    text = shown_at([Change(At(Metrics()).read(0.0))], 80)
    assert text.count("nothing yet") == 2 and "none" in text and "host 0 %" in text


def test_one_that_does_not_answer_is_named_among_the_others() -> None:
    gone = Reading("gone.0", "page", trouble="cannot read http://127.0.0.1:1/metrics (refused)")
    text = shown_at([Change(At(Metrics()).read(0.0)), Change(gone)], 80)
    assert "blue.0" in text and "gone.0" in text and "refused" in text


def test_what_comes_from_outside_cannot_move_the_cursor() -> None:
    evil = At(Metrics())
    evil.metrics.describe(engine="\x1b[2Je", model='m"\\\n', name="\x1b]0;x\x07", rank=0, version="1")
    one = Reading("\x1b[31m", "page", parse_samples(evil.metrics.exposition()))
    assert one.samples["kvbm_info"][0][0]["model"] == 'm"\\\n', "as it was given"
    assert "\x1b" not in shown_at([Change(one)], 200) and "\x1b" not in one.title


def test_top_as_json_has_rates_of_every_instance(three: dict[str, Metrics]) -> None:
    busy(three["blue.1"])
    code, out, error = run("top", "--json", "--interval", "0.2")
    assert (code, error) == (0, "")
    found = {one["name"]: one for one in json.loads(out)["instances"]}
    assert list(found) == list(three)
    one = found["blue.1"]
    assert one["about"]["model"] == MODEL and one["seconds"] > 0.1
    assert one["tiers"]["host"] == {"used": 900.0, "capacity": 1000.0}
    assert one["transfers"][0] | {"bytes_per_s": 0} == {
        "from": "disk",
        "to": "host",
        "bytes_per_s": 0,
        "bytes": 7_000_000.0,
        "slowest_s": 0.02,
        "slowest_bytes": 7_000_000.0,
    }
    assert one["evicted"][0]["reason"] == "room" and one["waiting_blocks"]["disk"] == 170.0
    assert one["troubles"] == [{"kind": "failures", "what": "onboard_timed_out", "count": 2.0}]
    assert not found["blue.0"]["transfers"]


def test_status_shows_every_instance(three: dict[str, Metrics]) -> None:
    busy(three["green.0"])
    code, out, _ = run("status")
    assert code == 0
    for words in (*three, "time to first token saved (estimate)", "tokens from disk", "waiting for disk"):
        assert words in out
    _, out, _ = run("status", "--json")
    series = json.loads(out)
    assert {one["instance"] for one in series} == set(three)
    of_green = [
        one for one in series if one["instance"] == "green.0" and one["name"] == "kvbm_hit_tokens_total"
    ]
    assert {one["labels"]["tier"]: one["value"] for one in of_green}["host"] == 2000.0


def test_the_fleet_over_nats_and_pages_are_not_mixed(tmp_path: Path) -> None:
    code, _, error = run("top", "6880", "--key", str(tmp_path / "key"))
    assert code == 2 and "--key: goes without pages" in error


def test_metrics_are_told_to_whom_asks_over_the_socket(three: dict[str, Metrics]) -> None:
    from kvbm_core.control.asking import ask_here

    (answer,) = ask_here(Order(verb=Verb.METRICS)).answers
    assert answer.page.startswith("# HELP kvbm_") and len(answer.page) < 64 * 1024
    (answer,) = ask_here(Order(verb=Verb.STATUS)).answers
    assert answer.page == ""


# ---------------------------------------------------------------- on a terminal


def on_terminal(command: list[str], ends: Callable[[str], bytes | None]) -> tuple[int, str]:
    """Runs ``command`` on a terminal of its own; ``ends``: which keys to press, by what is shown so far."""
    pid, terminal = pty.fork()
    if pid == 0:  # the child
        os.environ.update(TERM="xterm", COLUMNS="100", LINES="40")
        os.execv(command[0], command)
    shown, pressed, ends_at_s = "", False, time.monotonic() + PATIENCE_S
    with ExitStack() as stack:
        stack.callback(os.close, terminal)
        while time.monotonic() < ends_at_s:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    shown += os.read(terminal, 65536).decode(errors="replace")
                except OSError:  # it has ended
                    break
            keys = None if pressed else ends(shown)
            if keys is not None:
                os.write(terminal, keys)
                pressed = True
        else:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown


@pytest.mark.parametrize(("command", "keys"), [("top", b"q"), ("top", b"\x03"), ("status", b"q")])
def test_it_is_shown_again_until_a_key_says_that_it_is_enough(
    three: dict[str, Metrics], command: str, keys: bytes
) -> None:
    options = ["--interval", "0.3"] if command == "top" else ["--watch", "0.3"]
    line = [sys.executable, "-m", "kvbm_core.cli.main", command, *options]
    given: list[int] = []

    def press(shown: str) -> bytes | None:
        if "blue.0" in shown and not given:
            three["blue.0"].failure("worker_lost")  # is seen at the next look, without a key
            given.append(1)
        return keys if "worker_lost" in shown else None

    code, shown = on_terminal(line, press)
    assert code == 0, shown
    assert "worker_lost" in shown and "Traceback" not in shown
    assert shown.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in shown, "the terminal is as it was"


def test_without_a_terminal_top_ends_by_itself(three: dict[str, Metrics]) -> None:
    code, out, _ = run("top", "--interval", "0.2")
    assert code == 0 and out.count("instances: 3") == 1


EVIL = (
    'kvbm_info{name="a\\n\x1b[31m",rank="0",engine="e",model="m",version="1"} 1\n'
    "kvbm_pending_jobs NaN\nkvbm_live_leases +Inf\nkvbm_host_cache_hit_rate NaN\n"
    'kvbm_evicted_blocks_total{tier="\x1b[2J",reason="\x07"} 1e308\n'
    'kvbm_tier_transfer_bytes_total{from="\x1b]0;x",to="[bold]y"} 7\nkvbm_tier_transfer_bytes_total 1\n'
    "kvbm_evicted_blocks_total 1\n"
)


@contextmanager
def page_of(content: Callable[[BaseHTTPRequestHandler], object]) -> Iterator[str]:
    """A page of somebody else's."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            content(self)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()


def test_a_page_of_somebody_elses_tells_a_terminal_nothing_and_is_json_all_the_same() -> None:
    with page_of(lambda handler: handler.wfile.write(EVIL.encode())) as url:
        for words in (["status", url], ["top", "--once", "--interval", "0.2", url]):
            result = CliRunner().invoke(app, words, env={"NO_COLOR": "1", "COLUMNS": "200"})
            assert result.exit_code == 0
            assert all(char.isprintable() for line in result.stdout.split("\n") for char in line)
            told = CliRunner().invoke(app, [*words, "--json"]).stdout
            json.loads(told, parse_constant=pytest.fail)


def test_who_says_little_and_slowly_is_given_up() -> None:
    ended = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        while not ended.wait(0.05):
            handler.wfile.write(b"# nothing\n")

    with page_of(drip) as url:
        (reading,) = Sought((url,), timeout_s=0.5).read()
        ended.set()
    assert "says too little in this time" in reading.trouble


# ---------------------------------------------------------------- other machines, by etcd


@dataclass
class Fleet:
    """Engines of other machines, as far as who looks can tell: their sockets are elsewhere, and they listen
    where other machines could.
    """

    etcd: EtcdServer
    address: str
    token: Path
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    @contextmanager
    def engine(self, name: str, **more: object) -> Iterator[Metrics]:
        """Until etcd has forgotten it. ``more``: settings."""
        settings = KvbmSettings.from_env(
            {"cpu_cache_gb": 1, "instance": name, "fleet_insecure": True, **more}
        )
        metrics, about = Metrics(), About("an engine", MODEL, 0)
        served = metrics_server(settings, metrics, about)
        cache = AtOnce(lambda: frozenset({Tier.HOST}), lambda tiers: True)
        with self.monkeypatch.context() as apart:
            elsewhere = self.folder / name
            elsewhere.mkdir()
            apart.setattr("tempfile.tempdir", str(elsewhere))
            service = control_service(settings, about, cache, metrics, served=served)
        assert service is not None
        try:
            wait_for(lambda: f"{name}.0" in (listed(KvbmSettings.from_env(None)) or {}))
            yield metrics
        finally:
            service.close()
            if served is not None:
                served.close()

    def by_http(self, port: int) -> dict[str, object]:
        """Settings of an engine that takes orders where other machines reach it."""
        address = f"{self.address}:{port}"
        return {"control": "http", "control_http": address, "control_token_file": str(self.token)}


@pytest.fixture
def fleet(tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    address = own_address(EtcdOptions((("192.0.2.1", 1),)))  # nothing is sent there
    if is_loopback(address):
        pytest.skip("NOT RUN: kvbm top by etcd; this machine has no address that others could reach")
    token = tmp_path / "token"
    token.write_text("a token that nobody else has\n")
    token.chmod(0o600)
    (tmp_path / "etcd").mkdir()
    with EtcdServer(tmp_path / "etcd") as etcd:
        monkeypatch.setenv("ETCD_ENDPOINTS", etcd.url)
        monkeypatch.setenv("KVBM_FLEET_LEASE_S", "2")
        yield Fleet(etcd, address, token, short_path, monkeypatch)


@pytest.mark.etcd
def test_instances_of_other_machines_are_found_by_etcd(fleet: Fleet) -> None:
    by_http = fleet.by_http(free_port())
    page = {"metrics": True, "metrics_port": free_port(), "metrics_host": fleet.address}
    local, alone = ({**by_http, "control_http": f"127.0.0.1:{free_port()}"} for _ in range(2))
    with (
        engine("here", control="socket"),
        fleet.engine("asked", **by_http) as asked,
        fleet.engine("paged", **{**local, **page}) as paged,
        fleet.engine("hidden", **alone),
    ):
        for note in private_place().glob("*.page"):  # of this process, so that it is found by etcd alone
            note.unlink()
        asked.matched_tokens(32)
        paged.matched_tokens(64)
        found = {one.name: one for one in Sought().read()}
        assert list(found) == ["asked.0", "here.0", "hidden.0", "paged.0"]
        assert found["paged.0"].samples["kvbm_matched_tokens"][0][1] == 64
        assert not found["here.0"].trouble
        assert "set KVBM_CONTROL_TOKEN_FILE" in found["asked.0"].trouble
        assert "from its own machine alone" in found["hidden.0"].trouble
        fleet.monkeypatch.setenv("KVBM_CONTROL_TOKEN_FILE", str(fleet.token))
        (one,) = Sought(instance="asked").read()
        assert not one.trouble and one.samples["kvbm_matched_tokens"][0][1] == 32
        code, output, _ = run("top", "--once", "--interval", "0.2")
        assert code == 0 and "instances: 4" in output and "own machine alone" in " ".join(output.split())


@pytest.mark.etcd
def test_who_lacks_the_token_sees_who_is_there_and_why_no_more(fleet: Fleet) -> None:
    with fleet.engine("asked", **fleet.by_http(free_port())):
        code, output, _ = run("top", "--once", "--interval", "0.2")
        words = " ".join(output.split())
        assert code == 0 and "asked.0" in words and f"an engine, {MODEL} on " in words
        assert "KVBM_CONTROL_TOKEN_FILE" in words


@pytest.mark.etcd
def test_a_token_goes_only_where_who_has_it_says(fleet: Fleet) -> None:
    """etcd is not trusted: an address of somebody else's gets no token."""
    heard: list[str] = []

    class Thief(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.headers["Authorization"])
            self.send_error(500)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    fleet.monkeypatch.setenv("KVBM_CONTROL_TOKEN_FILE", str(fleet.token))
    thief = ThreadingHTTPServer((fleet.address, 0), Thief)
    threading.Thread(target=thief.serve_forever, daemon=True).start()
    with closing(thief.socket), fleet.engine("asked", **fleet.by_http(free_port())):
        true = (listed(KvbmSettings.from_env(None)) or {})["asked.0"]
        assert true is not None
        false = msgspec.structs.replace(
            true, instance="false", address=f"{fleet.address}:{thief.server_port}"
        )
        client = fleet.etcd.client()
        client.put("/kvbm/v1/default/inst/false.0", msgspec.json.encode(false))
        client.put("/kvbm/v1/default/inst/odd.0", b"\xff")
        client.close()
        found = {one.name: one.trouble for one in Sought().read()}
        assert not found["asked.0"] and "it is not sent there" in found["false.0"]
        assert "cannot be read" in found["odd.0"] and heard == []
        other = fleet.folder / "other"
        other.write_text("another token, of another fleet\n")
        other.chmod(0o600)
        fleet.monkeypatch.setenv("KVBM_CONTROL_TOKEN_FILE", str(other))
        (one,) = Sought(instance="asked").read()
        assert "it is not sent there" in one.trouble
    thief.shutdown()


@pytest.mark.etcd
def test_without_etcd_who_is_here_is_shown_all_the_same(fleet: Fleet) -> None:
    fleet.etcd.stop()
    with engine("here", control="socket"):
        found = {one.name: one.trouble for one in Sought().read()}
        assert found["here.0"] == "" and "ETCD_ENDPOINTS" in found["etcd"]
        assert "here.0" in run("top", "--once", "--interval", "0.2")[1]

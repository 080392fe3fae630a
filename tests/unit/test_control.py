"""Orders of operators: who may give them, what a leader and other caches make of them, and the private
socket.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from kvbm_core.cli.main import app
from kvbm_core.config import KvbmSettings
from kvbm_core.control import asking, socket_wire
from kvbm_core.control import operators as operators_module
from kvbm_core.control.asking import ask_here
from kvbm_core.control.desk import BUSY, MAX_WAITING, About, AtOnce, Desk
from kvbm_core.control.messages import MAX_ORDER_BYTES, Answer, Order, Verb, decode
from kvbm_core.control.messages import Result as Became
from kvbm_core.control.operators import MAX_SKEW_S, OPERATORS, OperatorKey, Operators, RefusedError
from kvbm_core.control.place import private_place
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.assembly import control_service
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.testing.leader_bench import LeaderBench
from kvbm_core.types import Tier
from tests.unit.control_bench import NAMESPACE, Cache, here, operator, taking_orders, wait_for
from tests.unit.local_bench import KEYS, LocalBench

__all__ = ["here"]

HERE = {"control": "socket", "instance": "one"}
PROMPT = list(range(100, 120))
STATUS = Order(verb=Verb.STATUS, fleet="f", instance="one")
ALL = Order(verb=Verb.RESET)


def reset(tier: str = "all") -> Order:
    return Order(verb=Verb.RESET, tier=tier)  # type: ignore[arg-type]


# ---------------------------------------------------------------- who may give orders over a network


class Times:
    """A wall clock."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def signer(tmp_path: Path) -> OperatorKey:
    return operator(tmp_path)[0]


def changed(payload: bytes, **parts: object) -> bytes:
    """The signed order with other parts."""
    return json.dumps({**json.loads(payload), **parts}).encode()


def another_order(payload: bytes, **fields: object) -> bytes:
    """With another order under the same signature."""
    return changed(payload, order=json.dumps({**json.loads(json.loads(payload)["order"]), **fields}))


def test_an_operators_order_is_taken_once(signer: OperatorKey) -> None:
    now = Times()
    now.now_s -= 1  # it has started before
    operators = Operators(f"U, {signer.public}".split(", ")[1], "f", "one", now)
    now.now_s += 1
    payload = signer.sign(STATUS)
    assert operators.check(payload).verb is Verb.STATUS
    with pytest.raises(RefusedError, match="given before"):
        operators.check(payload)
    assert operators.check(signer.sign(STATUS)).verb is Verb.STATUS


ATTEMPTS: dict[str, tuple[Callable[[bytes, OperatorKey], bytes], str]] = {
    "nothing": (lambda p, k: b"", "no signed order"),
    "no JSON": (lambda p, k: b"\xff\x00{", "no signed order"),
    "unsigned": (lambda p, k: msgspec.json.encode(STATUS), "no signed order"),
    "huge": (lambda p, k: p + b" " * MAX_ORDER_BYTES, "no signed order"),
    "deep": (lambda p, k: b"[" * 4000, "no signed order"),
    "wrong types": (lambda p, k: changed(p, order=5), "no signed order"),
    "more than there is": (lambda p, k: changed(p, more=1), "no signed order"),
    "a key of nobody": (lambda p, k: changed(p, key="U" * 56), "not in"),
    "another operator's signature": (
        lambda p, k: changed(p, signature=json.loads(k.sign(STATUS))["signature"]),
        "signature is wrong",
    ),
    "another verb": (lambda p, k: another_order(p, verb="reset"), "signature is wrong"),
    "another time": (lambda p, k: another_order(p, time_s=time.time() + 1), "signature is wrong"),
    "no signature": (lambda p, k: changed(p, signature=""), "signature is wrong"),
    "no base64": (lambda p, k: changed(p, signature="?" * 88), "signature is wrong"),
    "a short one": (lambda p, k: changed(p, signature=base64.b64encode(b"x").decode()), "signature is wrong"),
    "half a character": (lambda p, k: changed(p, order="\ud800"), "no signed order|signature is wrong"),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_an_operator_has_not_signed_is_refused(name: str, signer: OperatorKey, tmp_path: Path) -> None:
    attempt, why = ATTEMPTS[name]
    began_s = time.time() - 5
    operators = Operators(signer.public, "f", "one", lambda: began_s)
    other, _ = operator(tmp_path, "other")
    with pytest.raises(RefusedError, match=why) as refused:
        operators.check(attempt(signer.sign(STATUS), other))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ({"verb": "erase"}, "does not know"),
        ({"verb": "reset", "tier": "remote"}, "does not know"),
        ({"verb": "status", "wait_s": 1e9}, "does not know"),
        ({"verb": "status", "wait_s": "now"}, "does not know"),
        ({"verb": "status", "instance": "two"}, "another instance"),
        ({"verb": "status", "fleet": "g"}, "another instance"),
        ({"verb": "status", "nonce": "short"}, "given before"),
    ],
)
def test_an_order_that_is_signed_and_not_for_us_is_refused(
    order: dict[str, object], why: str, signer: OperatorKey
) -> None:
    """As an operator's newer or broken command may send it."""
    given = {"fleet": "f", "instance": "one", "time_s": time.time(), "nonce": "n" * 16, **order}
    text = json.dumps(given).encode()
    signature = base64.b64encode(signer._pair.sign(operators_module._CONTEXT + text)).decode()
    payload = json.dumps({"order": text.decode(), "key": signer.public, "signature": signature}).encode()
    clock = Times()
    clock.now_s -= 1
    operators = Operators(signer.public, "f", "one", clock)
    clock.now_s += 1
    with pytest.raises(RefusedError, match=why):
        operators.check(payload)


@pytest.mark.parametrize(("skew_s", "side"), [(31, "behind"), (-31, "ahead of"), (3600, "behind")])
def test_clocks_that_do_not_agree_are_named(skew_s: float, side: str, signer: OperatorKey) -> None:
    operators = Operators(signer.public, "f", "one", lambda: time.time() + skew_s)
    with pytest.raises(RefusedError, match=rf"its time is {abs(skew_s)} s {side} this machine's clock"):
        operators.check(signer.sign(STATUS))


def test_a_restart_forgets_no_order_that_could_be_given_again(signer: OperatorKey) -> None:
    payload = signer.sign(STATUS)
    restarted = Operators(signer.public, "f", "one")
    with pytest.raises(RefusedError, match="before this instance had started"):
        restarted.check(payload)


def test_what_is_remembered_of_orders_is_bounded(
    signer: OperatorKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators_module, "MAX_NONCES", 3)
    clock = Times()
    operators = Operators(signer.public, "f", "one", clock)
    for _ in range(3):
        operators.check(signer.sign(STATUS))
    with pytest.raises(RefusedError, match="too many orders"):
        operators.check(signer.sign(STATUS))
    assert len(operators._nonces) == 3
    clock.now_s += 2 * MAX_SKEW_S + 1
    with pytest.raises(RefusedError, match="behind"):  # as the clock says now
        operators.check(signer.sign(STATUS))
    clock.now_s -= MAX_SKEW_S + 2
    with pytest.raises(RefusedError, match="too many"):
        operators.check(signer.sign(STATUS))


@pytest.mark.parametrize("keys", ["", " , ", "UABC", "U" * 56, "é" * 56, "SUA" + "A" * 55])
def test_operators_that_are_no_keys_are_one_line(keys: str) -> None:
    with pytest.raises(ConfigError, match=OPERATORS) as caught:
        Operators(keys, "f", "one")
    assert "\n" not in str(caught.value)


def test_a_key_file_of_others_or_without_a_key_is_refused(tmp_path: Path) -> None:
    _, path = operator(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        OperatorKey(path)
    (empty := tmp_path / "empty").write_bytes(b"no seed")
    empty.chmod(0o600)
    for wrong in (empty, tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match="--key"):
            OperatorKey(wrong)


# ---------------------------------------------------------------- a leader


def test_a_leader_takes_orders_in_its_step_and_no_sooner() -> None:
    bench = LeaderBench()
    bench.store(PROMPT)
    end = bench.desk.submit(ALL)
    assert not end.done() and bench.tier.resident_blocks == 5
    bench.leader.poll()
    assert end.result().text == "forgotten: host" and bench.tier.resident_blocks == 0
    assert bench.metric('kvbm_tier_blocks{tier="host",state="used"}') == 0
    bench.assert_idle()


def test_a_reset_waits_for_loads_and_holds_new_ones_back() -> None:
    bench = LeaderBench()
    bench.store(PROMPT)
    state = bench.open("loads")
    assert bench.match(state, PROMPT) == 16
    end = bench.desk.submit(ALL)
    bench.leader.poll()
    assert not end.done()  # it is promised
    plan = bench.leader.onboard(state, 16, [[11, 12, 13, 14, 15]])
    assert plan is not None
    bench.leader.poll()
    other = bench.open("other")
    assert not end.done() and bench.match(other, PROMPT) == 0
    assert bench.offload(other, range(200, 220)) is None
    bench.answer(plan)
    assert end.result().result is Became.DONE and bench.tier.resident_blocks == 0
    plan = bench.offload(other, PROMPT)
    assert plan is not None  # all goes on
    bench.answer(plan)
    bench.leader.finish(state)
    bench.leader.finish(other)
    bench.assert_idle()


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_a_reset_that_a_bug_meets_is_answered_and_the_next_one_is_carried_out(
    salt: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("a bug")

    bench = LeaderBench()
    bench.store(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(bench.leader.chain, "reset" if salt is None else "forget_of", fail)
        ends = [bench.desk.submit(order) for order in (Order(verb=Verb.RESET, salt=salt), reset("disk"))]
        bench.leader.poll()
    failed, refused = (end.result(0) for end in ends)
    assert failed[:2] == (Became.REFUSED, "it failed: RuntimeError: a bug")
    assert refused[:2] == (Became.REFUSED, "there is no disk tier here")
    assert bench.tier.resident_blocks == 5


def test_a_promise_that_nobody_comes_back_for_does_not_hold_a_reset_up() -> None:
    bench = LeaderBench(options=LeaderOptions(lease_ttl_s=5.0))
    bench.store(PROMPT)
    state = bench.open("gone")
    assert bench.match(state, PROMPT) == 16
    end = bench.desk.submit(ALL)
    bench.leader.poll()
    assert not end.done()
    bench.clock.advance(5.0)
    bench.leader.poll()
    assert end.done() and bench.tier.resident_blocks == 0
    bench.leader.finish(state)
    bench.assert_idle()


def test_a_drained_leader_ends_what_is_under_way_and_begins_nothing() -> None:
    bench = LeaderBench()
    bench.store(PROMPT)
    writer = bench.open("writer")
    moving = bench.offload(writer, range(200, 220))
    end = bench.desk.submit(Order(verb=Verb.DRAIN))
    bench.leader.poll()
    assert end.result().result is Became.DONE and bench.desk.is_draining
    assert "drained" in bench.leader.readiness().reason
    reader = bench.open("reader")
    assert bench.match(reader, PROMPT) == 0 and bench.offload(reader, range(300, 320)) is None
    bench.answer(moving)
    assert bench.resident_blocks(range(200, 220)) == 5  # what was on its way has come
    bench.desk.submit(Order(verb=Verb.RESUME))
    bench.leader.poll()
    assert bench.match(reader, PROMPT) == 16
    for state in (writer, reader):
        bench.leader.finish(state)
    bench.assert_idle()


def test_a_tier_that_is_not_there_is_refused_and_nothing_is_forgotten() -> None:
    bench = LeaderBench()
    bench.store(PROMPT)
    end = bench.desk.submit(reset("disk"))
    bench.leader.poll()
    assert end.result()[:2] == (Became.REFUSED, "there is no disk tier here")
    assert bench.tier.resident_blocks == 5


def test_who_has_gone_does_not_hurt_the_engines_thread() -> None:
    bench = LeaderBench()
    end = bench.desk.submit(ALL)
    assert not end.cancel()
    bench.leader.poll()
    assert end.done()


def test_orders_that_nobody_takes_are_bounded() -> None:
    desk = Desk()
    ends = [desk.submit(ALL) for _ in range(MAX_WAITING + 5)]
    assert [end.result() for end in ends if end.done()] == [BUSY] * 5


# ---------------------------------------------------------------- a cache that any thread may touch


def test_local_tiers_forget_when_loads_and_promises_have_ended(tmp_path: Path) -> None:
    bench = LocalBench(tmp_path)
    try:
        bench.store(KEYS[:4])
        assert bench.tiers.match("a", KEYS[:3]) == 3
        done: list[bool] = []
        thread = threading.Thread(target=lambda: done.append(bench.tiers.reset({Tier.HOST}, 30)))
        thread.start()
        wait_for(lambda: bench.tiers._num_resetting > 0)
        assert bench.tiers.match("b", KEYS[:3]) == 0 and bench.tiers.contains(KEYS[0])
        assert bench.load("a", KEYS[:3]) is Outcome.OK and bench.came(KEYS[:3])
        thread.join(30)
        assert done == [True] and not bench.tiers.contains(KEYS[0])
        assert bench.store(KEYS[:4]) is Outcome.OK and bench.tiers.match("c", KEYS[:3]) == 3
        assert not bench.tiers.reset({Tier.HOST}, 0.0) and bench.tiers.contains(KEYS[0])
        bench.tiers.check_integrity()
    finally:
        bench.close()


def test_one_order_at_a_time_and_a_bug_is_told() -> None:
    may_go, begun = threading.Event(), threading.Event()

    def forget(tiers: frozenset[Tier]) -> bool:
        begun.set()
        may_go.wait(30)
        raise RuntimeError("a bug")

    control = AtOnce(lambda: frozenset({Tier.HOST}), forget)
    first = control.submit(ALL)
    assert begun.wait(30)
    assert "another order is under way" in control.submit(ALL).result(30).text
    may_go.set()
    assert first.result(30).text == "it failed: RuntimeError: a bug"


# ---------------------------------------------------------------- the private socket, and the command


def fleet(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["fleet", *arguments], env={"NO_COLOR": "1", "COLUMNS": "200"})


@pytest.mark.shows("KVBM_CONTROL=socket")
def test_the_command_asks_the_engines_of_this_machine(here: Path) -> None:
    cache, other = Cache(), Cache()
    metrics = Metrics()
    metrics.tier_usage(Tier.HOST, 3, 10)
    with (
        taking_orders(HERE, cache.control, metrics),
        taking_orders({**HERE, "instance": "two"}, other.control),
    ):
        table = fleet("status")
        assert table.exit_code == 0
        for word in ("one.0", "two.0", "a/model", NAMESPACE, "host 3 of 10", "in service"):
            assert word in table.output
        assert fleet("reset", "--instance", "two", "--tier", "disk").exit_code == 0
        assert (cache.resets, other.resets) == ([], [frozenset({Tier.DISK})])
        assert fleet("reset", "--all", "--namespace", "f" * 16).exit_code == 0
        assert not cache.resets
        assert fleet("reset", "--all", "--namespace", NAMESPACE).exit_code == 0
        assert cache.resets == [frozenset({Tier.HOST, Tier.DISK})]
        assert fleet("drain", "--instance", "one").exit_code == 0
        found = json.loads(fleet("status", "--json").stdout)["answers"]
        assert [answer["status"]["is_draining"] for answer in found] == [True, False]
        assert fleet("resume", "--all").exit_code == 0 and not cache.control.is_draining


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["reset"], 2, "--instance NAME or --all"),
        (["drain", "--all", "--instance", "one"], 2, "--instance NAME or --all"),
        (["reset", "--all", "--tier", "remote"], 2, "write all, host, disk"),
        (["reset", "--instance", "a.*.>"], 2, "no name"),
        (["reset", "--instance", "a b"], 2, "no name"),
        (["status", "--key", "nowhere"], 2, "cannot be read"),
        (["status"], 1, "nobody is there"),
    ],
)
def test_what_cannot_be_asked_is_one_line(arguments: list[str], code: int, line: str, here: Path) -> None:
    done = fleet(*arguments)
    assert done.exit_code == code and line in done.stderr and done.stderr.count("\n") == 1


def test_an_idle_engine_says_that_it_will_be_done_at_the_next_step(here: Path) -> None:
    bench = LeaderBench()
    bench.store(PROMPT)
    with taking_orders(HERE, bench.desk):
        done = fleet("reset", "--all", "--wait", "0.2", "--json")
        assert done.exit_code == 3 and "at its next step" in done.stdout
        assert fleet("status").exit_code == 0
    state = bench.open()
    bench.leader.poll()  # as each engine does before it asks for a match
    assert bench.match(state, PROMPT) == 0
    bench.leader.finish(state)


def connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(30)
    client.connect(str(path))
    return client


@pytest.mark.parametrize(
    "payload",
    [
        b"\n",
        b"\xff\xfe\x00\n",
        b"{}\n",
        b'{"verb": "erase"}\n',
        b'{"verb": "reset", "tier": ["host"]}\n',
        b"[" * 5000 + b"\n",
        b"x" * 1_000_000,
        b'{"verb": "reset"}',  # and the end of it
    ],
    ids=["nothing", "no text", "no verb", "unknown", "wrong type", "deep", "huge", "cut off"],
)
def test_what_is_no_order_gets_no_answer_and_changes_nothing(payload: bytes, here: Path) -> None:
    cache = Cache()
    with taking_orders(HERE, cache.control):
        (path,) = socket_wire.sockets()
        with connect(path) as client:
            try:
                client.sendall(payload)
                client.shutdown(socket.SHUT_WR)
                assert client.recv(100) == b""
            except (ConnectionError, BrokenPipeError):
                pass  # it has hung up
        assert not cache.resets and len(ask_here(Order(verb=Verb.STATUS)).answers) == 1


def test_who_connects_and_says_nothing_is_let_go(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_wire, "READ_TIMEOUT_S", 0.3)
    with taking_orders(HERE, Cache().control):
        (path,) = socket_wire.sockets()
        silent = [connect(path) for _ in range(socket_wire.MAX_CONNECTIONS)]
        try:
            for client in silent:
                assert client.recv(100) == b""
            assert len(ask_here(Order(verb=Verb.STATUS)).answers) == 1
        finally:
            for client in silent:
                client.close()


def test_who_connects_too_often_is_let_go_at_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_wire, "READ_TIMEOUT_S", 600.0)  # the others stay
    with taking_orders(HERE, Cache().control):
        (path,) = socket_wire.sockets()
        clients = [connect(path) for _ in range(socket_wire.MAX_CONNECTIONS + 1)]
        try:
            assert clients[-1].recv(100) == b""
        finally:
            for client in clients:
                client.close()


def test_only_its_user_can_reach_the_socket(here: Path) -> None:
    cache = Cache()
    with taking_orders(HERE, cache.control):
        (path,) = socket_wire.sockets()
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
        if os.getuid():
            pytest.skip("NOT RUN: orders of another user; needs root to become one")
        assert _as_another_user(path) == "PermissionError"
        for opened, mode in ((here, 0o755), (path.parent, 0o755), (path, 0o666)):  # as a mistake would
            opened.chmod(mode)
        seen = _as_another_user(path)  # the kernel says who it is
        assert seen in ("b''", "BrokenPipeError", "ConnectionResetError")
        assert not cache.resets


def _as_another_user(path: Path) -> str:
    program = (
        "import os, socket, sys\n"
        "client = socket.socket(socket.AF_UNIX)\n"
        "os.setgroups([]), os.setgid(65534), os.setuid(65534)\n"
        "try:\n"
        "    client.connect(sys.argv[1])\n"
        '    client.sendall(b\'{"verb": "reset"}\\n\')\n'
        "    print(client.recv(100))\n"
        "except OSError as error: print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_folder_that_others_can_enter_is_not_used(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    private_place().mkdir(mode=0o755)
    with taking_orders(HERE, Cache().control):
        assert "is not private to this user" in caplog.text and not list(private_place().iterdir())


def test_sockets_of_engines_that_were_killed_are_no_engines(here: Path) -> None:
    with taking_orders(HERE, Cache().control):
        (path,) = socket_wire.sockets()
        dead = path.with_name("dead.0-0.ctl")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
            left.bind(str(dead))
        asked = ask_here(Order(verb=Verb.STATUS))
        assert [answer.instance for answer in asked.answers] == ["one"] and not asked.missing
        assert not dead.exists()
    assert not socket_wire.sockets() and not list(private_place().iterdir())


def test_an_engine_that_stands_still_is_named(here: Path) -> None:
    path = private_place()
    path.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as frozen:  # it listens, and nobody is there
        frozen.bind(str(path / "still.0-1.ctl"))
        frozen.listen(8)
        with taking_orders(HERE, Cache().control):
            done = fleet("status", "--wait", "0.1")
    assert done.exit_code == 1 and "still.0 did not answer" in done.stderr and "one.0" in done.stdout


def test_answers_show_nothing_that_a_terminal_heeds(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = Answer(instance="\x1b[2J[red]x", rank=0, result=Became.REFUSED, text="\x1b]0;pwned\x07")
    asked = asking.Asked([hostile], ["\x1b"], is_list_known=True)
    monkeypatch.setattr(asking, "ask_here", lambda order: asked)
    done = fleet("status")
    assert "\x1b" not in done.output and "\x07" not in done.output and "[red]x" in done.output


@pytest.mark.shows("KVBM_CONTROL=off")
def test_with_nothing_asked_for_there_is_nothing(here: Path) -> None:
    threads = set(threading.enumerate())
    settings = KvbmSettings.from_env({"cpu_cache_gb": 0.1, "control": "off"})
    assert control_service(settings, About("e", "m", 0), Desk(), Metrics()) is None
    assert set(threading.enumerate()) <= threads and not list(here.iterdir())


def test_nothing_is_left_after_the_end(here: Path) -> None:
    threads = set(threading.enumerate())
    with taking_orders(HERE, Cache().control):
        assert set(threading.enumerate()) != threads
    assert set(threading.enumerate()) <= threads


def test_who_connects_at_the_end_leaves_no_socket_open(here: Path) -> None:
    """asyncio does not close what it accepted for a server that has closed meanwhile."""
    paths, is_over = [here / "none"], threading.Event()

    def connect() -> None:
        while not is_over.is_set():
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
                caller.setblocking(False)
                caller.connect(str(paths[-1]))

    before = len(os.listdir("/proc/self/fd"))
    callers = [threading.Thread(target=connect) for _ in range(2)]
    try:
        for caller in callers:
            caller.start()
        for _ in range(30):
            with taking_orders(HERE, Cache().control):
                paths += socket_wire.sockets()
    finally:
        is_over.set()
        for caller in callers:
            caller.join()
    gc.collect()  # it says what was left open, and that is an error
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_answer_is_small() -> None:
    """Also with names as long as they can be."""
    assert decode(b'{"instance": "a", "rank": 0, "result": "done"}', Answer) is not None
    assert decode(b"x" * (MAX_ORDER_BYTES + 1), Order) is None


def test_an_engine_that_knows_no_requests_says_why_not(here: Path) -> None:
    settings = KvbmSettings.from_env({"cpu_cache_gb": 0.1, "control": "socket", "instance": "one"})
    about = About("an engine", "a/model", 0, no_reasons="it is not told of requests")
    service = control_service(settings, about, Cache().control, Metrics())
    assert service is not None
    try:
        done = CliRunner().invoke(app, ["why"], env={"NO_COLOR": "1", "COLUMNS": "200"})
    finally:
        service.close()
    assert done.exit_code == 0 and done.stderr == "kvbm why: one.0: it is not told of requests\n"

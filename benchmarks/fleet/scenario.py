"""What happens to one fleet: registration, steady load, loss of etcd, loss of NATS, a restart of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fleet.children import Child, cpu_s, rss_bytes
from benchmarks.fleet.figures import AWAY, PHASES, Figures
from benchmarks.fleet.instance import ROOT, Place, sessions_of
from benchmarks.fleet.meters import EtcdMeter, NatsMeter, Pulse
from benchmarks.suite import CannotRun, expect
from kvbm_core.fleet.keys import new_keys
from tests.engines.etcd_server import EtcdServer, find_etcd
from tests.engines.nats_server import NatsServer, find_server
from tests.engines.ports import free_port

PATIENCE_S = 180.0
POLL_S = 0.1
SETTLE_S = 3.0
PER_PROCESS = 125
MOMENT_S = 0.5


@dataclass(frozen=True)
class Plan:
    """``blocks_per_s``: of the whole fleet, at most ``instance_blocks_per_s`` of each. ``away_s``: how long
    etcd and NATS are killed and frozen.
    """

    instances: int
    blocks_per_s: float = 10_000.0
    instance_blocks_per_s: float = 312.0
    host_blocks: int = 512
    steady_s: float = 20.0
    away_s: float = 20.0
    lease_s: float = 15.0

    @property
    def each_blocks_per_s(self) -> float:
        """Of an instance."""
        return min(self.instance_blocks_per_s, self.blocks_per_s / self.instances)


class Fleet:
    """The processes. A context manager. ``told`` is called with what happens now."""

    def __init__(self, plan: Plan, folder: Path, told: Callable[[str], None]) -> None:
        self.plan = plan
        self.told = told
        self.etcd = EtcdServer(folder)
        self._monitor_port = free_port()
        self.nats = NatsServer(folder, "-m", str(self._monitor_port))
        self._folder = folder
        self._stack = ExitStack()
        self.workers: list[Child] = []
        self._spare: list[Child] = []

    def __enter__(self) -> Fleet:
        if find_etcd() is None or find_server() is None:
            raise CannotRun("there is no etcd or no nats-server: python deploy/setup_env.py brings both")
        with ExitStack() as stack:
            stack.enter_context(self.etcd)
            stack.enter_context(self.nats)
            new_keys(self._folder / "keys", "fleet")
            self.etcd_meter = stack.enter_context(closing(EtcdMeter(self.etcd)))
            self.nats_meter = stack.enter_context(closing(NatsMeter(self.nats, self._monitor_port)))
            self.place = Place(
                self.etcd.port,
                self.plan.lease_s,
                self.nats.url,
                self.nats.user,
                self.nats.password,
                str(self._folder / "keys"),
                self.plan.host_blocks,
            )
            self.reader = self._child("reader", stack)
            stack.callback(self._close_workers)
            self.prepare()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _child(self, name: str, stack: ExitStack) -> Child:
        child = Child(f"benchmarks.fleet.{name}", self._folder / f"{name}.log")
        stack.callback(child.close)
        return child

    def prepare(self) -> None:
        """Processes for another life of all instances; they only load."""
        number = -(-self.plan.instances // PER_PROCESS)
        self._spare = [
            Child("benchmarks.fleet.worker", self._folder / f"worker-{i}.log") for i in range(number)
        ]
        for child in self._spare:
            child.ask("status")

    def begin(self) -> None:
        """A life of all instances, in those processes."""
        self.workers, self._spare = self._spare, []
        count, first = len(self.workers), 0
        for i, worker in enumerate(self.workers):
            number = (self.plan.instances - first) // (count - i)
            worker.tell("begin", first=first, count=number, **asdict(self.place))
            first += number
        for worker in self.workers:
            worker.answer()

    def kill(self) -> None:
        """All instances at once. Their next life is another one."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.close()
        self.workers = []
        self.place = replace(self.place, life=self.place.life + 1)

    def _close_workers(self) -> None:
        for child in (*self.workers, *self._spare):
            child.close()

    # ---------------------------------------------------------------- what they say

    def ask(self, do: str, **given: Any) -> list[dict[str, Any]]:
        """All workers at once."""
        for worker in self.workers:
            worker.tell(do, **given)
        return [worker.answer() for worker in self.workers]

    def status(self) -> dict[str, float]:
        """Sums over all, and the peak of one."""
        answers = self.ask("status")
        found = {name: sum(answer[name] for answer in answers) for name in answers[0]}
        return {**found, "peak_waiting_bytes": max(answer["peak_waiting_bytes"] for answer in answers)}

    def used_s(self) -> float:
        """CPU time of the simulation."""
        return sum(cpu_s(worker.pid) for worker in self.workers)

    def churn(self, is_on: bool) -> None:
        """All instances store blocks, or none does."""
        self.ask("churn", blocks_per_s=self.plan.each_blocks_per_s if is_on else 0.0)

    def is_registered(self) -> bool:
        """Every leader and every rank has a session and its record, and knows the other."""
        count, found = self.plan.instances, self.status()
        if found["met"] < count or found["sessions"] < sessions_of(count):
            return False
        with closing(self.etcd.client()) as client:
            records = sum(1 for _ in client.get_prefix(ROOT, keys_only=True))
        return records == sessions_of(count)

    def is_current(self, since_s: float) -> bool:
        """The reader has heard of every instance since, and misses nothing."""
        count = self.plan.instances
        return bool(self.reader.ask("status", since_s=since_s, count=count)["current"] == count)

    def is_right(self) -> bool:
        """The reader's pictures are what the instances have."""
        truth = {name: held for answer in self.ask("truth") for name, held in answer.items()}
        return self.reader.ask("pictures", count=self.plan.instances) == truth


def until(condition: Callable[[], bool], what: str) -> float:
    """How many seconds it took. WrongAnswer if it never comes."""
    began_s = time.monotonic()
    while not condition():
        expect(time.monotonic() < began_s + PATIENCE_S, f"{what}: not within {PATIENCE_S:.0f} s")
        time.sleep(POLL_S)
    return time.monotonic() - began_s


def _right(fleet: Fleet, after: str) -> None:
    """Nothing may be missing, and nothing be there that is gone."""
    fleet.churn(False)
    until(fleet.is_right, f"pictures after {after} that are what the instances have")


def register(fleet: Fleet) -> Figures:
    """From nothing."""
    count = fleet.plan.instances
    before, used_s = fleet.etcd_meter.read(), sum(cpu_s(child.pid) for child in fleet._spare)
    began_s = time.monotonic()
    fleet.begin()
    until(fleet.is_registered, "registration")
    took_s = time.monotonic() - began_s
    after = fleet.etcd_meter.read()
    found = {
        "register_s": took_s,
        "register_calls": _calls(before.counts, after.counts) / count,
        "register_etcd_cpu": 1e3 * (after.cpu_s - before.cpu_s) / count,
        "register_own_cpu": 1e3 * (fleet.used_s() - used_s) / count,
    }
    fleet.ask("fill")
    fleet.reader.ask("begin", **asdict(fleet.place))
    found["follow_s"] = until(lambda: fleet.is_current(0.0), "a reader's start")
    _right(fleet, "the start")
    return found


def _calls(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    return sum(after[name] - before.get(name, 0.0) for name in after if name.startswith("calls_"))


def steady(fleet: Fleet) -> Figures:
    """Without blocks, then with."""
    count, seconds = fleet.plan.instances, fleet.plan.steady_s
    before = fleet.nats_meter.read()
    time.sleep(seconds / 2)
    idle = before.rates(fleet.nats_meter.read())
    fleet.churn(True)
    time.sleep(SETTLE_S)
    readers = [fleet.reader.ask("status")]
    etcd, nats, own_s = fleet.etcd_meter.read(), fleet.nats_meter.read(), fleet.used_s()
    reader_s, blocks = cpu_s(fleet.reader.pid), fleet.status()["stored_blocks"]
    began_s = time.monotonic()
    time.sleep(seconds)
    stored = fleet.status()["stored_blocks"] - blocks
    seconds = time.monotonic() - began_s
    stored /= seconds
    readers.append(fleet.reader.ask("status"))
    etcd_now, nats_now = fleet.etcd_meter.read(), fleet.nats_meter.read()
    own = (fleet.used_s() - own_s) / seconds
    reader = (cpu_s(fleet.reader.pid) - reader_s) / seconds
    of_etcd, of_nats = etcd.rates(etcd_now), nats.rates(nats_now)
    return {
        "etcd_cpu": 100 * of_etcd["cpu"],
        "etcd_cpu_each": 1e6 * of_etcd["cpu"] / count,
        "etcd_rss": etcd_now.rss_bytes / 1e6,
        "etcd_keepalives": of_etcd.get("messages_LeaseKeepAlive", 0.0),
        "etcd_reads": of_etcd.get("calls_Range", 0.0),
        "etcd_bytes": of_etcd["bytes"] / 1e3,
        "nats_idle_cpu": 100 * idle["cpu"],
        "load": stored,
        "nats_cpu": 100 * of_nats["cpu"],
        "nats_cpu_each": 1e6 * of_nats["cpu"] / (of_nats["in_msgs"] + of_nats["out_msgs"]),
        "nats_rss": nats_now.rss_bytes / 1e6,
        "nats_msgs": of_nats["in_msgs"],
        "nats_bytes": of_nats["in_bytes"] / 1e3,
        "block_bytes": of_nats["in_bytes"] / stored,
        "reader_cpu": 100 * reader,
        "reader_cpu_each": 1e6 * reader / (2 * stored),
        "reader_rss": rss_bytes(fleet.reader.pid) / 1e6,
        "lag_p50": 1e3 * readers[1]["lag_p50_s"],
        "lag_p99": 1e3 * readers[1]["lag_p99_s"],
        "own_cpu": 100 * own,
        "own_rss": sum(rss_bytes(worker.pid) for worker in fleet.workers) / count / 1e6,
    }


def _lose(server: EtcdServer | NatsServer, how: str, away_s: float) -> None:
    """Takes it away; returns when it is back."""
    if how == "frozen":
        server.freeze()
        time.sleep(away_s)
        server.thaw()
        return
    server.stop()
    time.sleep(MOMENT_S if how == "anew" else away_s)
    if how == "anew" and isinstance(server, EtcdServer):
        server.lose_all()
    server.start(server.port)


def lose_etcd(fleet: Fleet, how: str) -> Figures:
    """In this way of AWAY; the time counts from when it is back."""
    title = f"etcd {AWAY[how]}"
    fleet.told(f"{fleet.plan.instances} instances: {title}")
    fleet.churn(False)
    with Pulse(fleet.etcd_meter) as pulse:
        _lose(fleet.etcd, how, fleet.plan.away_s)
        took_s = until(fleet.is_registered, f"{title}: all registered again")
    return {f"etcd_{how}_s": took_s, f"etcd_{how}_peak": pulse.peak_second}


def lose_nats(fleet: Fleet, how: str) -> Figures:
    """The same of NATS, under load."""
    title = f"NATS {AWAY[how]}"
    fleet.told(f"{fleet.plan.instances} instances: {title}")
    fleet.churn(True)
    dumps = fleet.status()["dumps"]
    with Pulse(fleet.nats_meter) as pulse:
        _lose(fleet.nats, how, fleet.plan.away_s)
        took_s = until(partial(fleet.is_current, time.time()), f"{title}: pictures that are complete")
    status = fleet.status()
    _right(fleet, title)
    return {
        f"nats_{how}_s": took_s,
        f"nats_{how}_peak": pulse.peak_second,
        f"nats_{how}_tenth": pulse.peak_tenth,
        f"nats_{how}_waiting": status["peak_waiting_bytes"] / 1e3,
        f"nats_{how}_dumps": status["dumps"] - dumps,
    }


def _each_way(lose: Callable[[Fleet, str], Figures], fleet: Fleet) -> Figures:
    return {name: value for how in AWAY for name, value in lose(fleet, how).items()}


def restart(fleet: Fleet) -> Figures:
    """All processes are killed; others take their places at once, under the same names."""
    count = fleet.plan.instances
    fleet.churn(False)
    fleet.prepare()
    before = fleet.etcd_meter.read()
    with Pulse(fleet.nats_meter) as pulse:
        began_s, began_at_s = time.monotonic(), time.time()
        fleet.kill()
        fleet.begin()
        fleet.ask("fill")
        until(lambda: fleet.is_current(began_at_s) and fleet.is_right(), "pictures after all were killed")
        events_s = time.monotonic() - began_s
        until(fleet.is_registered, "registration after all were killed")
        took_s = time.monotonic() - began_s
    after = fleet.etcd_meter.read()
    return {
        "restart_s": took_s,
        "restart_events_s": events_s,
        "restart_calls": _calls(before.counts, after.counts) / count,
        "restart_etcd_cpu": 1e3 * (after.cpu_s - before.cpu_s) / count,
        "restart_peak": pulse.peak_second,
    }


def run(
    plan: Plan,
    folder: Path,
    phases: Sequence[str],
    told: Callable[[str], None],
    found: Callable[[str, Figures], None],
) -> None:
    """Those phases, once, the first one always. ``found`` is called with a phase and its figures when it is
    over. WrongAnswer, CannotRun.
    """
    losses = partial(_each_way, lose_etcd), partial(_each_way, lose_nats)
    doings: list[Callable[[Fleet], Figures]] = [register, steady, *losses, restart]
    with Fleet(plan, folder, told) as fleet:
        for phase, do in zip(PHASES, doings, strict=True):
            if phase in phases or do is register:
                told(f"{plan.instances} instances: {phase}")
                found(phase, do(fleet))

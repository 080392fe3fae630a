"""Fleets of simulated instances: kvbm's own sessions and publishers, a real etcd, a real NATS."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.fleet import report
from benchmarks.fleet.__main__ import main
from benchmarks.fleet.figures import AWAY, PHASES
from benchmarks.fleet.meters import Pulse
from benchmarks.fleet.scenario import Fleet, Plan, lose_nats, register

pytestmark = [pytest.mark.etcd, pytest.mark.nats]

FIFTY = Plan(50, blocks_per_s=2000.0, host_blocks=256, away_s=1.0, lease_s=3.0)


def ignore(text: str) -> None:
    """Nobody watches."""


def test_fifty_instances_register_and_come_back_one_by_one(tmp_path: Path) -> None:
    """After NATS has been killed. Pictures are compared with what the instances have, not with themselves."""
    with Fleet(FIFTY, tmp_path, ignore) as fleet:
        found = register(fleet)
        fleet.nats.freeze()
        fleet.ask("fill")
        assert not fleet.is_right() and not fleet.is_current(time.time())
        fleet.nats.thaw()
        found |= lose_nats(fleet, "anew")
    print(found)
    assert found["register_calls"] < 20 and found["register_s"] < 15
    assert found["nats_anew_tenth"] < 30, "they come at moments of their own"
    assert found["nats_anew_s"] < 15


def test_the_report_has_every_figure_of_every_size(tmp_path: Path) -> None:
    rows = [row for phase in PHASES.values() for row in phase]
    sizes = {count: {row.name: float(count) for row in rows} for count in (1000, 100)}
    path = report.write(sizes, tmp_path, {"away_s": 20.0})
    table = path.read_text()
    assert all(f"| {row.title} | {row.unit} | 100 | 1,000 |" in table for row in rows)
    plain = json.loads((tmp_path / "fleet.json").read_text())
    assert plain["instances"]["1000"] == sizes[1000] and plain["settings"] == {"away_s": 20.0}
    assert (tmp_path / "fleet.png").stat().st_size > 10_000
    assert len({row.name for row in rows}) == len(rows)


def test_a_pulse_sees_how_much_comes_at_once() -> None:
    """Also of a server that has just started, and one that is away for a while."""

    class Meter:
        def __init__(self) -> None:
            self.server = SimpleNamespace(pid=1)
            self.count = 100.0

        def newcomers(self) -> float:
            return self.count

    meter = Meter()
    with Pulse(meter) as pulse:
        meter.server.pid, meter.count = 2, 40.0
    assert pulse.peak_second == 40.0 and pulse.peak_tenth == pytest.approx(40.0)


@pytest.mark.nightly("three sizes, a quarter of an hour")
@pytest.mark.timeout(3600)
def test_a_thousand_instances(tmp_path: Path) -> None:
    """Without the loss of etcd: two cores that run them all are too few for as many new sessions at once."""
    assert main(["--instances", "100,300", "--output", str(tmp_path / "small")]) == 0
    phases = [phase for phase in PHASES if phase != "loss of etcd"]
    large = ["--instances", "1000", "--phases", ",".join(phases), "--output", str(tmp_path / "large")]
    assert main(large) == 0
    small = json.loads((tmp_path / "small" / "fleet.json").read_text())["instances"]
    names = {row.name for rows in PHASES.values() for row in rows}
    assert small["100"].keys() == small["300"].keys() == names
    for how in AWAY:
        assert all(found[f"etcd_{how}_s"] < 60 and found[f"nats_{how}_s"] < 60 for found in small.values())
    found = json.loads((tmp_path / "large" / "fleet.json").read_text())["instances"]["1000"]
    assert found["register_s"] < 60 and found["nats_killed_s"] < 60
    assert found["nats_killed_tenth"] < 300, "they come at moments of their own"

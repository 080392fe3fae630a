"""What is measured of each size of fleet, in the order of the report."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """``name``: of the figure; ``is_time``: it is in the plot of times."""

    name: str
    title: str
    unit: str
    is_time: bool = False


AWAY = {"killed": "killed", "frozen": "frozen", "anew": "restarted at once, empty"}

REGISTER = (
    Row("register_s", "all registered, leaders and ranks met", "s", True),
    Row("register_calls", "calls to etcd per instance", ""),
    Row("register_etcd_cpu", "etcd's CPU per instance", "ms"),
    Row("register_own_cpu", "the simulation's CPU per instance", "ms"),
    Row("follow_s", "a reader that starts knows all of them", "s", True),
)
STEADY = (
    Row("etcd_cpu", "etcd: CPU", "% of a core"),
    Row("etcd_cpu_each", "etcd: CPU per instance and second", "us"),
    Row("etcd_rss", "etcd: memory", "MB"),
    Row("etcd_keepalives", "etcd: keepalives", "/s"),
    Row("etcd_reads", "etcd: reads", "/s"),
    Row("etcd_bytes", "etcd: bytes, both ways", "KB/s"),
    Row("nats_idle_cpu", "NATS without blocks, heartbeats alone: CPU", "% of a core"),
    Row("load", "load: blocks stored, and as many removed", "/s"),
    Row("nats_cpu", "NATS: CPU", "% of a core"),
    Row("nats_cpu_each", "NATS: CPU per message, in and out", "us"),
    Row("nats_rss", "NATS: memory", "MB"),
    Row("nats_msgs", "NATS: messages in", "/s"),
    Row("nats_bytes", "NATS: bytes in", "KB/s"),
    Row("block_bytes", "bytes of a block, stored and removed", ""),
    Row("reader_cpu", "one reader of all: CPU", "% of a core"),
    Row("reader_cpu_each", "one reader of all: CPU per block event", "us"),
    Row("reader_rss", "one reader of all: memory", "MB"),
    Row("lag_p50", "one reader of all: lag, median", "ms"),
    Row("lag_p99", "one reader of all: lag, 99th percentile", "ms"),
    Row("own_cpu", "the simulation: CPU", "% of a core"),
    Row("own_rss", "the simulation: memory per instance", "MB"),
)
ETCD = tuple(
    row
    for how, title in AWAY.items()
    for row in (
        Row(f"etcd_{how}_s", f"etcd {title}: all registered again after", "s", True),
        Row(f"etcd_{how}_peak", f"etcd {title}: new sessions in a second, at most", ""),
    )
)
NATS = tuple(
    row
    for how, title in AWAY.items()
    for row in (
        Row(f"nats_{how}_s", f"NATS {title}: all pictures complete again after", "s", True),
        Row(f"nats_{how}_peak", f"NATS {title}: connections in a second, at most", ""),
        Row(f"nats_{how}_tenth", f"NATS {title}: connections in 0.1 s, at most", ""),
        Row(f"nats_{how}_waiting", f"NATS {title}: events that wait in one instance, at most", "KB"),
        Row(f"nats_{how}_dumps", f"NATS {title}: dumps that the reader asked for", ""),
    )
)
RESTART = (
    Row("restart_s", "all killed and started at once: all registered, new leaders found", "s", True),
    Row("restart_events_s", "all killed and started at once: all pictures right", "s", True),
    Row("restart_calls", "calls to etcd per instance", ""),
    Row("restart_etcd_cpu", "etcd's CPU per instance", "ms"),
    Row("restart_peak", "NATS: connections in a second, at most", ""),
)
PHASES = {
    "registration": REGISTER,
    "steady load": STEADY,
    "loss of etcd": ETCD,
    "loss of NATS": NATS,
    "mass restart": RESTART,
}
Figures = dict[str, float]

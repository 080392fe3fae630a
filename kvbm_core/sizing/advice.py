"""Sizes for each tier: what they find, how soon requests start, what the disk has to bear, which to take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvbm_core.replay.machine import EVERYTHING, FILTER, Policy, Sizes
from kvbm_core.replay.trace import Trace
from kvbm_core.sizing.hardware import COPY_SHARE, DISK_SHARE, MEASURED_SHARE, PREFILL_SHARE, Hardware, Span
from kvbm_core.sizing.model import Floats, KvShape, Model, SizingError
from kvbm_core.sizing.reuse import Found, Reuse, fit

NEAR_POINTS = 0.02
"""A smaller tier is taken if it finds at most so much less than the largest: shares of all prompt tokens."""
_PARTS = 10
"""Of a trace, whose hit rates are the range; the first is left out: the tiers were empty."""
_DAY_S = 86_400.0
_GROWTH = 2


class Limits(NamedTuple):
    """What kvbm may have. ``drive_writes_per_day``: how often the disk may be written over in a day."""

    host_gb: float = 1000.0
    disk_gb: float = 8000.0
    drive_writes_per_day: float = 1.0


class Start(NamedTuple):
    """Time to first token in seconds, without the wait for other requests: the middle and the 90th
    percentile, each from the better to the worse machine.
    """

    p50_s: Span
    p90_s: Span


@dataclass(frozen=True, slots=True)
class Choice:
    """Tiers of these sizes, and what comes of them. Rates are shares of all prompt tokens. ``rates``: the
    least and the most of a tenth of the trace.
    """

    host_gb: float
    disk_gb: float
    policy: Policy
    sizes: Sizes
    device_rate: float
    host_rate: float
    disk_rate: float
    rates: Span
    start: Start
    prefill_share: Span
    written_tb_per_day: float

    @property
    def rate(self) -> float:
        """Found in any tier."""
        return self.device_rate + self.host_rate + self.disk_rate

    @property
    def drive_writes_per_day(self) -> float:
        """How often the disk is written over."""
        return self.written_tb_per_day * 1000 / self.disk_gb if self.disk_gb else 0.0

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "host_gb": round(self.host_gb, 3),
            "disk_gb": round(self.disk_gb, 3),
            "disk_takes": self.policy.name if self.disk_gb else None,
            **self.sizes._asdict(),
            "hit_rate": self.rate,
            "hit_rate_least": self.rates.worse,
            "hit_rate_most": self.rates.better,
            "device_hit_rate": self.device_rate,
            "host_hit_rate": self.host_rate,
            "disk_hit_rate": self.disk_rate,
            "ttft_p50_s": self.start.p50_s._asdict(),
            "ttft_p90_s": self.start.p90_s._asdict(),
            "prefill_share_of_time": self.prefill_share._asdict(),
            "disk_written_tb_per_day": self.written_tb_per_day,
            "drive_writes_per_day": self.drive_writes_per_day,
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """``choices``: the device alone first, then hosts, then disks below the host that was taken.
    ``warnings``: one line each.
    """

    choices: tuple[Choice, ...]
    taken: Choice
    device_gb: float
    block_bytes: int
    curve: tuple[tuple[float, float], ...]
    """Gigabytes of host memory, and the rate of device and host together."""
    warnings: tuple[str, ...]

    @property
    def environment(self) -> list[str]:
        """Lines to paste."""
        lines = []
        if self.taken.host_gb:
            lines.append(f"export DYN_KVBM_CPU_CACHE_GB={_whole(self.taken.host_gb)}")
        if self.taken.disk_gb:
            lines.append(f"export DYN_KVBM_DISK_CACHE_GB={_whole(self.taken.disk_gb)}")
            lines.append("export DYN_KVBM_DISK_CACHE_DIR=/mnt/nvme/kvbm   # your disk")
            if self.taken.policy is EVERYTHING:
                lines.append("export DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER=true")
        return lines


def _whole(gb: float) -> str:
    """Rounded up, so that nothing is missing."""
    return f"{np.ceil(gb):.0f}" if gb >= 1 else f"{gb:.3f}"


class Adviser:
    """Weighs sizes for one load, model and machine."""

    def __init__(self, trace: Trace, model: Model, kv: KvShape, hardware: Hardware, limits: Limits) -> None:
        self._trace = fit(trace)
        self._reuse = Reuse(self._trace)
        self._model = model
        self._hardware = hardware
        self._limits = limits
        self.block_bytes = kv.stored_bytes * self._trace.block_tokens
        self.device_gb = hardware.device_gb(model.weights_bytes)
        self.device_blocks = int(self.device_gb * 1e9 / (kv.device_bytes * self._trace.block_tokens))
        if not self.device_blocks:
            tokens = self._trace.block_tokens
            raise SizingError(f"{self.device_gb:.3f} GB on the device hold no block of {tokens} tokens")
        self._prompts = np.array([request.prompt_tokens for request in self._trace.requests], np.float64)

    def advise(self, told: Callable[[str], None] = lambda what: None) -> Advice:
        """Looks at hosts first, then at disks below the host that is taken."""
        alone = self.weigh(0.0, 0.0, FILTER)
        hosts = []
        for size_gb in self._steps(self._device_in_host_gb, self._limits.host_gb):
            told(f"host of {size_gb:,.0f} GB")
            hosts.append(self.weigh(size_gb, 0.0, FILTER))
        host = _smallest_near_best(hosts, alone)
        # Where a host alone finds nothing, one as large as the device's cache is what a disk needs.
        hub = host if host.host_gb else next(iter(hosts), alone)
        disks = []
        for size_gb in self._disk_steps(hub):
            told(f"disk of {size_gb:,.0f} GB")
            disks += [self.weigh(hub.host_gb, size_gb, policy) for policy in (FILTER, EVERYTHING)]
        bearable = [
            disk
            for disk in disks
            if disk.policy is FILTER or disk.drive_writes_per_day <= self._limits.drive_writes_per_day
        ]
        taken = _smallest_near_best(bearable, host)
        return Advice(
            (alone, *hosts, *disks),
            taken,
            self.device_gb,
            self.block_bytes,
            tuple(self._curve()),
            tuple(self._warnings(alone, taken)),
        )

    @property
    def _device_in_host_gb(self) -> float:
        """What is on the device takes so much below it."""
        return self.device_blocks * self.block_bytes / 1e9

    def _steps(self, first_gb: float, most_gb: float) -> Iterator[float]:
        """Doubling, until the whole trace has room."""
        whole_gb = self._trace.distinct_blocks * self.block_bytes / 1e9
        size_gb = first_gb
        while size_gb < min(most_gb, whole_gb):
            yield size_gb
            size_gb *= _GROWTH
        last_gb = min(most_gb, max(first_gb, whole_gb))
        if last_gb * 1e9 >= self.block_bytes:
            yield last_gb

    def _finds_nearly_all(self, choice: Choice) -> bool:
        (all_there_is,) = self._reuse.hit_rates([self._trace.distinct_blocks])
        return choice.rate >= all_there_is - NEAR_POINTS

    def _disk_steps(self, host: Choice) -> Iterator[float]:
        """None if the host finds nearly all that there is."""
        if host.host_gb and not self._finds_nearly_all(host):
            yield from self._steps(_GROWTH * host.host_gb, self._limits.disk_gb)

    def _curve(self) -> Iterator[tuple[float, float]]:
        blocks = np.unique(np.geomspace(1, max(2, self._trace.distinct_blocks), 200).astype(np.int64))
        rates = self._reuse.hit_rates([max(int(count), self.device_blocks) for count in blocks])
        for count, rate in zip(blocks, rates, strict=True):
            yield float(count) * self.block_bytes / 1e9, rate

    def weigh(self, host_gb: float, disk_gb: float, policy: Policy) -> Choice:
        """What tiers of these sizes do."""
        sizes = Sizes(self.device_blocks, *(int(gb * 1e9 / self.block_bytes) for gb in (host_gb, disk_gb)))
        found = self._reuse.found(sizes, policy)
        tokens = self._trace.block_tokens / max(1, self._trace.prompt_tokens)
        seconds = max(self._trace.seconds, 1.0)
        worse, better = (self._times(found, is_better=is_better) for is_better in (False, True))
        return Choice(
            host_gb=host_gb,
            disk_gb=disk_gb,
            policy=policy,
            sizes=sizes,
            device_rate=int(found.device.sum()) * tokens,
            host_rate=int(found.host.sum()) * tokens,
            disk_rate=int(found.disk.sum()) * tokens,
            rates=self._rates(found),
            start=Start(*(_percentile(worse.sum(0), better.sum(0), part) for part in (50, 90))),
            prefill_share=Span(float(worse[0].sum()) / seconds, float(better[0].sum()) / seconds),
            written_tb_per_day=found.written_blocks * self.block_bytes / 1e12 * _DAY_S / seconds,
        )

    def _rates(self, found: Found) -> Span:
        tokens = (found.device + found.host + found.disk) * self._trace.block_tokens
        parts = [
            part_found.sum() / max(1.0, part_prompts.sum())
            for part_found, part_prompts in zip(
                np.array_split(tokens, _PARTS), np.array_split(self._prompts, _PARTS), strict=True
            )
        ]
        return Span(float(min(parts[1:])), float(max(parts[1:])))

    def _times(self, found: Found, *, is_better: bool) -> Floats:
        """Seconds of each request: computing, and loading."""
        hardware, block_tokens = self._hardware, self._trace.block_tokens
        hits = ((found.device + found.host + found.disk) * block_tokens).astype(np.float64)
        new = np.maximum(self._prompts - hits, 1.0)
        if hardware.prefill_tokens_s is not None:
            computing = new / (hardware.prefill_tokens_s * MEASURED_SHARE[is_better])
        else:
            flops = self._model.flops(new, new * hits + new * new / 2)
            computing = flops / (hardware.num_ranks * hardware.gpu.tflops * 1e12 * PREFILL_SHARE[is_better])
        link_bytes_s = hardware.num_ranks * hardware.gpu.host_gb_s * 1e9 * COPY_SHARE[is_better]
        disk_bytes_s = hardware.disk_gb_s * 1e9 * DISK_SHARE[is_better]
        loading = (found.host + found.disk) * self.block_bytes / link_bytes_s
        loading = loading + found.disk * self.block_bytes / disk_bytes_s
        return np.stack([computing, loading])

    def _warnings(self, alone: Choice, taken: Choice) -> Iterator[str]:
        if taken.host_gb and taken.sizes.host_blocks < self.device_blocks:
            yield (
                f"the host ({taken.host_gb:.0f} GB) is smaller than the device's cache "
                f"({self._device_in_host_gb:.0f} GB), and finds nothing that the device has not; raise "
                "--max-host-gb"
            )
        if taken.disk_gb and taken.disk_gb <= taken.host_gb:
            yield "the disk is no larger than the host: raise --max-disk-gb"
        if not taken.host_gb and self._finds_nearly_all(alone):
            yield "the device alone finds nearly all that there is: kvbm would not help this load"
        elif not taken.host_gb:
            yield (
                "within these limits nothing finds more than the device alone, though there is more: raise "
                "--max-host-gb or --max-disk-gb"
            )
        elif not taken.disk_gb:
            yield "no disk: it would find too little that the host has not"
        if taken.prefill_share.better > 1:
            yield (
                f"this load needs {taken.prefill_share.better:.1f} such engines or more for prefill alone; "
                "each of them then sees a part of it, and needs a part of these sizes"
            )
        if taken.drive_writes_per_day > self._limits.drive_writes_per_day:
            yield f"the disk is written over {taken.drive_writes_per_day:.1f} times a day"
        longest = int(self._prompts.max())
        if self._model.max_tokens and longest > self._model.max_tokens:
            yield f"prompts have up to {longest:,} tokens, the model takes {self._model.max_tokens:,}"


def _percentile(worse: Floats, better: Floats, part: int) -> Span:
    return Span(float(np.percentile(worse, part)), float(np.percentile(better, part)))


def _smallest_near_best(choices: list[Choice], without: Choice) -> Choice:
    """The first that finds nearly as much as the best; ``without`` if even that one does."""
    best = max((choice.rate for choice in choices), default=0.0)
    return next(choice for choice in [without, *choices] if choice.rate >= best - NEAR_POINTS)

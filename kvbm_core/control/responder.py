"""What an instance answers to an order, whatever wire it came by."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from kvbm_core import __version__
from kvbm_core.control.desk import About, Controlled, Report
from kvbm_core.control.messages import MAX_NAME, Answer, Order, Result, Status, Verb
from kvbm_core.control.why_rows import rows_of
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.readiness import Readiness


class Responder:
    """On the wires' thread."""

    def __init__(
        self,
        instance: str,
        about: About,
        controlled: Controlled,
        metrics: Metrics,
        readiness: Callable[[], Readiness],
    ) -> None:
        self.instance = instance
        self.about = about
        self._controlled = controlled
        self._metrics = metrics
        self._readiness = readiness

    def refuse(self, text: str) -> Answer:
        """To what is not carried out."""
        return Answer(
            instance=self.instance, rank=self.about.rank, result=Result.REFUSED, text=text[:MAX_NAME]
        )

    async def answer(self, order: Order) -> Answer:
        """Carries the order out, or hands it to who will, and waits as long as the order says."""
        if order.instance not in ("", self.instance):
            return self.refuse("the order is for another instance")
        report = await self._report(order)
        return Answer(
            instance=self.instance,
            rank=self.about.rank,
            result=report.result,
            text=report.text[:MAX_NAME],
            status=self._status(),
            page=self._metrics.exposition() if order.verb is Verb.METRICS else "",
            why=rows_of(self._metrics.why, order.request, order.count) if order.verb is Verb.WHY else (),
            found=report.found,
        )

    async def _report(self, order: Order) -> Report:
        if order.verb is Verb.WHY:
            return Report(Result.DONE, self.about.no_reasons)
        if order.verb in {Verb.STATUS, Verb.METRICS}:
            return Report(Result.DONE)
        namespace = self.about.namespace()
        if order.namespace and order.namespace != namespace:
            return Report(Result.DONE, f"nothing to do: its namespace is {namespace or 'not known yet'}")
        end = asyncio.wrap_future(self._controlled.submit(order))
        await asyncio.wait({end}, timeout=order.wait_s)
        return end.result() if end.done() else Report(Result.PENDING, self._controlled.later)

    def _status(self) -> Status:
        readiness, window = self._readiness(), self._metrics.hit_window()
        tiers = {name: usage for name, usage in self._metrics.tiers().items() if any(usage)}
        hits = (window.host_hit_blocks, window.disk_hit_blocks, window.object_hit_blocks)
        return Status(
            engine=self.about.engine,
            version=__version__,
            host=socket.gethostname(),
            pid=os.getpid(),
            model=self.about.model[:MAX_NAME],
            namespace=self.about.namespace(),
            is_draining=self._controlled.is_draining,
            trouble=readiness.reason[:MAX_NAME],
            tiers=tiers,
            hit_rates=dict(zip(("host", "disk", "remote"), map(window.rate, hits), strict=True)),
            pending_transfers=self._metrics.pending_jobs(),
        )

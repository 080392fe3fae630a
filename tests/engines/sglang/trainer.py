"""A trainer in SGLang's scheduler process: it writes to the model's tensors, and tells nobody but by a flush.
Runs in SGLang's environment.
"""

from __future__ import annotations

import os
from functools import wraps
from pathlib import Path
from typing import Any

from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

from tests.engines.sglang.engine_job import WRITE


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """The scheduler's process: what ``Engine.run_scheduler_process_func`` may be replaced by."""
    flush = Scheduler.flush_cache

    @wraps(flush)
    def flush_cache(scheduler: Any, *more: Any, **named: Any) -> Any:
        if Path(os.environ[WRITE]).exists():
            for parameter in scheduler.tp_worker.model_runner.model.parameters():
                parameter.data += 0.05
            Path(os.environ[WRITE]).unlink()
        return flush(scheduler, *more, **named)

    Scheduler.flush_cache = flush_cache
    return run_scheduler_process(*args, **kwargs)

"""What a leader and its parts are told to do."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_core.runtime.request import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class LeaderOptions:
    """Times in seconds. ``share_loads``: wait for a prefix being loaded, as the engine will share its device
    blocks. ``fetch_wait_s``: wait so long, at most, for what a lower tier is bringing up.

    ``null_block``: the number that stands in the engine's block tables where it keeps no block.
    ``job_deadline_s``: what a rank has not answered by then is stuck, and what never came is not waited for;
    more than a worker gives its jobs.
    ``audit_rate``: the share of hits that are computed again and compared, 0 to 1; ``audit_seed``: see
    AuditSampler. ``state_every_tokens``: states inside a prompt, and older ones of an answer, are kept at
    least so far apart.
    """

    lease_ttl_s: float = 30.0
    share_wait_s: float = 1.0
    share_loads: bool = True
    fetch_wait_s: float = 0.0
    null_block: int = NULL_BLOCK
    job_deadline_s: float = 120.0
    audit_rate: float = 0.0
    audit_seed: int | None = None
    state_every_tokens: int = 4096

"""What an instance tells of its last requests: why each of them missed what it missed."""

from __future__ import annotations

import msgspec

from kvbm_core.observe.why import Account, WhyBook, age_s

MAX_ROWS = 200
MAX_ID, MAX_TEXT = 128, 300
MAX_ROWS_BYTES = 192 * 1024
"""As JSON; clients choose the ids of requests, and a control character has six bytes there."""


class WhyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request, in tokens; see Account. ``reason``: a MissReason; "" if nothing was missed."""

    request: str
    age_s: float
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    remote_tokens: int
    missed_tokens: int
    reason: str
    text: str


def rows_of(book: WhyBook, request: str, count: int) -> tuple[WhyRow, ...]:
    """Those of this id, or the last ones, as many as an answer may have; the newest first."""
    accounts = book.find(request)[:count] if request else book.last(count)
    rows, left_bytes = list[WhyRow](), MAX_ROWS_BYTES
    for row in map(_row, accounts):
        left_bytes -= len(msgspec.json.encode(row)) + 1
        if left_bytes < 0:
            break
        rows.append(row)
    return tuple(rows)


def _row(account: Account) -> WhyRow:
    return WhyRow(
        request=account.request_id[:MAX_ID],
        age_s=round(age_s(account), 3),
        prompt_tokens=account.prompt_tokens,
        device_tokens=account.device_tokens,
        host_tokens=account.host_tokens,
        disk_tokens=account.disk_tokens,
        remote_tokens=account.remote_tokens,
        missed_tokens=account.missed_tokens,
        reason="" if account.reason is None else account.reason.value,
        text=account.text[:MAX_TEXT],
    )

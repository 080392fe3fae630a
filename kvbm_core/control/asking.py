"""The operator's side: asks instances, and says who has not answered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from kvbm_core.config import KvbmSettings
from kvbm_core.control.listed import listed
from kvbm_core.control.messages import Answer, Order
from kvbm_core.control.socket_wire import ask_socket, name_of, sockets

if TYPE_CHECKING:
    from kvbm_core.control.operators import OperatorKey

EXTRA_WAIT_S = 2.0
"""Beyond what an instance is given to carry an order out."""


class Asked(msgspec.Struct):
    """``missing``: names (INSTANCE.RANK) of those who are there and have not answered. ``is_list_known``:
    whether etcd said who is there; else who never answers is not known of.
    """

    answers: list[Answer]
    missing: list[str]
    is_list_known: bool


def ask_here(order: Order) -> Asked:
    """All instances of this user on this machine, or one of them."""

    async def ask_all() -> list[Answer | None]:
        wait_s = order.wait_s + EXTRA_WAIT_S
        return await asyncio.gather(*(ask_socket(path, order, wait_s) for path in paths))

    paths = sockets()
    answers = asyncio.run(ask_all())
    missing = [
        name_of(path)
        for path, answer in zip(paths, answers, strict=True)
        if answer is None and path.exists() and _is_meant(name_of(path), order.instance)
    ]
    return Asked(_sorted(_meant(answers, order)), missing, is_list_known=True)


def ask_fleet(settings: KvbmSettings, key: OperatorKey, order: Order) -> Asked:
    """Over NATS. ConfigError, one line, if NATS or etcd cannot be asked."""
    from kvbm_core.control.nats_wire import ask_nats
    from kvbm_core.events.nats_sink import login_of

    expected = _listed(settings, order.instance)

    def is_complete(answers: list[Answer]) -> bool:
        return bool(expected) and set(expected or ()) <= {_name(answer) for answer in answers}

    wait_s = order.wait_s + EXTRA_WAIT_S
    answers = asyncio.run(ask_nats(login_of(settings), key, order, is_complete, wait_s))
    there = _meant(answers, order)
    missing = sorted((expected or set()) - {_name(answer) for answer in there})
    return Asked(_sorted(there), missing, is_list_known=expected is not None)


def _listed(settings: KvbmSettings, instance: str) -> set[str] | None:
    """Whom etcd lists to be asked over NATS, ``instance`` alone if it is given; None without etcd."""
    records = listed(settings)
    if records is None:
        return None
    names = {name for name, record in records.items() if record is None or "nats" in record.ways}
    return {name for name in names if not instance or name.rpartition(".")[0] == instance}


def _name(answer: Answer) -> str:
    return f"{answer.instance}.{answer.rank}"


def _is_meant(name: str, instance: str) -> bool:
    """``name``: as a socket is called, which may be cut."""
    return not instance or instance.startswith(name.rpartition(".")[0])


def _meant(answers: Iterable[Answer | None], order: Order) -> list[Answer]:
    return [one for one in answers if one is not None and order.instance in ("", one.instance)]


def _sorted(answers: list[Answer]) -> list[Answer]:
    return sorted(answers, key=lambda answer: (answer.instance, answer.rank))

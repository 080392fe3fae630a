"""etcd and NATS: whether they answer, and whether we may do there what engines do."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kvbm_core.cli.doctor.check import Check, Finding, Subject, error, ok
from kvbm_core.control.nats_wire import subject_of
from kvbm_core.events.nats_session import CONNECT_TIMEOUT_S, new_client
from kvbm_core.events.nats_sink import NatsLogin, login_of, subject
from kvbm_core.fleet.etcd import EtcdOptions, load_etcd3, open_client

LEASE_S = 5
ETCD_DEADLINE_S = 60.0
"""For all servers, one after the other."""
NATS_TIMEOUT_S = 5.0
NATS_REFUSAL_S = 1.0
"""A refusal follows what was refused; the server has answered a ping after it by then."""


def look_at_etcd(about: Subject) -> Iterator[Finding]:
    """Each server: puts a record as instances do, reads it, takes it back."""
    settings = about.settings
    options = EtcdOptions.from_settings(settings)
    if options is None:
        return
    load_etcd3()
    root = settings.fleet_root
    for number, (host, port) in enumerate(options.servers):
        where = f"etcd at {host}:{port}"
        try:
            _use_etcd(options, number, f"{root}doctor/{secrets.token_hex(8)}")
        except Exception as problem:  # etcd3's and gRPC's have no class in common
            yield error(f"{where}: {_grpc_reason(problem)}", _etcd_remedy(problem, root))
        else:
            yield ok(f"{where} keeps records below {root}")


def _use_etcd(options: EtcdOptions, number: int, name: str) -> None:
    client = open_client(options, number)
    try:
        lease = client.lease(LEASE_S)
        client.put(name, b"looked at", lease)
        if client.get(name)[0] != b"looked at":
            raise LookupError("what was put there a moment ago is not there")
        client.delete(name)
        with suppress(Exception):  # it ends by itself
            lease.revoke()
    finally:
        client.close()


def _grpc_reason(problem: Exception) -> str:
    details = getattr(problem, "details", None)
    if callable(details) and details():
        return str(details())
    return f"{type(problem).__name__} {problem}".strip()


def _etcd_remedy(problem: Exception, root: str) -> str:
    text = f"{_grpc_reason(problem)} {type(problem).__name__}".lower()
    if "permission denied" in text:
        return f"give the user's role reading and writing of the prefix {root}"
    if "auth" in text or "token" in text or "user name" in text:
        return "correct ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD"
    if "certificate" in text or "ssl" in text or "tls" in text:
        return "correct ETCD_AUTH_CA, ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY"
    return "start etcd there, or correct ETCD_ENDPOINTS, the scheme (http or https) and the firewall"


def look_at_nats(about: Subject) -> Iterator[Finding]:
    """Connects, and publishes and subscribes under a name that no instance has."""
    settings = about.settings
    is_for_events, is_for_orders = "nats" in settings.event_ways, "nats" in settings.control_ways
    if not (is_for_events or is_for_orders):
        return
    login = login_of(settings)
    login.check()
    name = f"doctor-{secrets.token_hex(8)}"
    subscribes, publishes = list[str](), list[str]()
    if is_for_events:
        stream = subject(settings.fleet, name, 0)
        subscribes.append(f"{stream}.dump")
        publishes.append(f"{stream}.kv")  # readers take nothing that is empty
    if is_for_orders:
        subscribes += [subject_of(settings.fleet, name), subject_of(settings.fleet)]
    where = f"NATS at {', '.join(_without_login(url) for url in login.servers())}"
    try:
        refused = asyncio.run(_use_nats(login, subscribes, publishes))
    except Exception as problem:  # whatever the client raises
        reason = f"{type(problem).__name__} {problem}".strip()
        yield error(f"{where}: {reason}", _nats_remedy(reason))
        return
    if refused:
        names = f"kvbm.v1.{settings.fleet}.>"
        remedy = f"allow the user to publish and subscribe to {names}, and to publish to _INBOX.>"
        yield error(f"{where}: {refused}", remedy)
    else:
        yield ok(f"{where} takes us, and lets us publish and subscribe")


async def _use_nats(login: NatsLogin, subscribes: list[str], publishes: list[str]) -> str:
    """What was refused; empty for nothing."""
    troubles: list[str] = []
    heard = asyncio.Event()

    async def failed(problem: Exception) -> None:
        troubles.append(str(problem))
        heard.set()

    client = new_client()
    options: dict[str, Any] = login.options() | {"name": "kvbm doctor", "error_cb": failed}
    try:
        connecting = client.connect(
            **options,
            connect_timeout=CONNECT_TIMEOUT_S,
            allow_reconnect=False,
            max_reconnect_attempts=1,  # 0 would be for good
            reconnect_time_wait=0,
        )
        await asyncio.wait_for(connecting, NATS_TIMEOUT_S)
        for name in subscribes:
            await client.subscribe(name)
        for name in publishes:
            await client.publish(name, b"")
        await client.flush(timeout=NATS_TIMEOUT_S)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(heard.wait(), NATS_REFUSAL_S)
        return troubles[0] if troubles else ""
    except Exception as problem:
        if troubles:  # it says more: a refusal closes the connection
            raise ConnectionError(troubles[0]) from problem
        raise
    finally:
        with suppress(Exception):
            await asyncio.wait_for(client.close(), CONNECT_TIMEOUT_S)


def _nats_remedy(reason: str) -> str:
    text = reason.lower()
    if "authorization" in text or "authentication" in text or "nkey" in text or "jwt" in text:
        return "correct NATS_AUTH_USERNAME and NATS_AUTH_PASSWORD (or token, nkey, credentials file)"
    if "tls is wanted" in text:
        return "give the server a certificate (tls in its configuration), or correct NATS_SERVER"
    if "ssl" in text or "certificate" in text or "tls" in text:
        return "write tls:// and set KVBM_NATS_CA_FILE (and KVBM_NATS_CERT_FILE, if the server asks for one)"
    return "start a NATS server there, or correct NATS_SERVER and the firewall"


def _without_login(url: str) -> str:
    return url.rpartition("@")[2].partition("://")[2] or url.rpartition("@")[2]


CHECKS = (
    Check(
        "etcd",
        "each server of ETCD_ENDPOINTS: whether we may keep records of the fleet there",
        look_at_etcd,
        ETCD_DEADLINE_S,
    ),
    Check("nats", "NATS, where events or orders go over it: login and rights", look_at_nats),
)

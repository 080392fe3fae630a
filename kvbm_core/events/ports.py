"""Where the consolidator publishes: a port that is kept for it from the moment that Dynamo is told of it."""

from __future__ import annotations

import socket

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError

PORT_OFFSET = 1000
"""KVBM's: the consolidator publishes so far above DYN_KVBM_LEADER_ZMQ_PUB_PORT."""
LOOPBACK = "127.0.0.1"


def wanted_port(settings: KvbmSettings) -> int:
    """KVBM's. ConfigError, one line, if there is none so high."""
    port = settings.leader_zmq_pub_port + PORT_OFFSET
    if port > 65535:
        remedy = (
            f"leaves no port for KV events, which are published {PORT_OFFSET} above it; choose a lower one"
        )
        raise ConfigError("DYN_KVBM_LEADER_ZMQ_PUB_PORT", settings.leader_zmq_pub_port, remedy)
    return port


class KeptPorts:
    """Ports of loopback that this process keeps for engines that it starts. Another process that asks before
    the engine listens there is refused, and does not tell its router to read this engine's events.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket | None] = {}

    def keep(self, wanted: int) -> int | None:
        """``wanted``, 0: any that is free. Asked again, the same. None: another process has it."""
        if wanted not in self._held:
            self._held[wanted] = _hold(wanted)
        holder = self._held[wanted]
        return None if holder is None else int(holder.getsockname()[1])

    def close(self) -> None:
        """Keeps nothing any more."""
        for holder in self._held.values():
            if holder is not None:
                holder.close()
        self._held.clear()


def _hold(port: int) -> socket.socket | None:
    """Bound, and never listened at."""
    holder = socket.socket()
    try:
        holder.bind((LOOPBACK, port))  # exclusively; from then on who listens there, as ZMQ does, may have it
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        holder.close()
        return None
    return holder


KEPT = KeptPorts()
"""Of this process, to its end."""

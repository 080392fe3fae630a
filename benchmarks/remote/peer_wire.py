"""The other process of ``peers`` and ``peers_nixl``: an owner of blocks, or whoever sends as many bytes: a
bare CURVE socket, or NIXL alone.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import zmq

from kvbm_core.config import KvbmSettings
from kvbm_core.fleet.gate import Gate
from kvbm_core.fleet.keys import CurveKeys
from kvbm_core.peers.ucx import Agent, rows_of
from kvbm_core.peers.wire import Terms
from kvbm_core.testing.peer_owner import ANY_PORT, Owner, key_of, wait_for

NAME = "127.0.0.1"
MAX_BYTES = 512 << 20
READY, SECONDS = "ready", "seconds"


def keys_in(folder: Path) -> CurveKeys:
    """The one pair that both processes have."""
    settings = {"curve_key_file": str(folder / f"{NAME}.key_secret"), "curve_allowed": str(folder)}
    keys = CurveKeys.from_settings(KvbmSettings.from_env(settings))
    if keys is None:
        raise ValueError(f"no keys in {folder}")
    return keys


def terms_of(instance: str, block_bytes: int) -> Terms:
    """Both sides fit together."""
    return Terms(instance, 0, 1, block_bytes, "benchmark", "benchmark")


def own(keys: CurveKeys | None, block_bytes: int, num_blocks: int, *, writes: bool = False) -> None:
    """Says where it is, and serves until standard input ends. ``writes``: by NIXL."""
    owner = Owner(
        terms_of("owner", block_bytes),
        num_slots=num_blocks,
        max_bytes=MAX_BYTES,
        bind=ANY_PORT,
        keys=keys,
        writes=writes,
    )
    owner.put(*map(key_of, range(1, num_blocks + 1)))
    if writes:
        wait_for(lambda: owner.server.writes)
    print(owner.address, flush=True)
    sys.stdin.read()
    owner.close()


def send(keys: CurveKeys, block_bytes: int) -> None:
    """Sends as many blocks as it is asked for."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gate(context, keys)
    socket = gate.server_socket(zmq.ROUTER)
    print(f"tcp://{NAME}:{socket.bind_to_random_port(f'tcp://{NAME}')}", flush=True)
    block = np.zeros(block_bytes, np.uint8)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while sys.stdin.fileno() not in (ready := dict(poller.poll())):
        if socket in ready:
            asker, count = socket.recv_multipart()
            for _ in range(int(count)):
                socket.send(asker, zmq.SNDMORE)
                socket.send(block.data, copy=False)
    socket.close(linger=0)
    gate.close()
    context.term()


def write(block_bytes: int, num_blocks: int) -> None:
    """NIXL alone. For each line "ZONE ADDRESS": writes all its blocks there, in one transfer, and says how
    many seconds that took.
    """
    memory = np.ones((num_blocks, block_bytes), np.uint8)
    agent = Agent("benchmark-writer", int(memory.ctypes.data), memory.nbytes)
    order = np.random.default_rng(0).permutation(num_blocks)
    print(READY, flush=True)
    for line in sys.stdin:
        zone, address = line.split()
        peer = agent.meet(bytes.fromhex(zone))
        sources = rows_of([int(memory[i].ctypes.data) for i in order], block_bytes)
        targets = rows_of([int(address) + i * block_bytes for i in range(num_blocks)], block_bytes)
        started_s = time.perf_counter()
        handle = agent.write(peer, sources, targets)
        while not agent.is_over(handle):
            pass
        print(SECONDS, time.perf_counter() - started_s, flush=True)
    agent.close()


if __name__ == "__main__":
    what, where, size, number = sys.argv[1:]
    if what == "own-nixl":
        own(None, int(size), int(number), writes=True)
    elif what == "write":
        write(int(size), int(number))
    elif what == "own":
        own(keys_in(Path(where)), int(size), int(number))
    else:
        send(keys_in(Path(where)), int(size))

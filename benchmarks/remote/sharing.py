"""What a second engine finds on each kind of store: ``python -m benchmarks.remote.sharing``.

Users with one system prompt ask a first engine once, twice or three times; then each of them asks a second
engine once. Settings are the defaults, the servers are started here, the engines are vLLM's scheduler with a
fake model: it is counted, not timed, and comes out the same each time.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

from rich.table import Table

from benchmarks.console import report_console
from tests.engines.mooncake_pool import find_mooncake
from tests.engines.object_servers import SeaweedServer
from tests.engines.shared_stores import bucket, directory, mooncake, valkey
from tests.engines.valkey_server import find_server
from tests.vllm.kvbm_engine import KvbmEngine

USERS, ROUNDS = 6, 3
BLOCK_TOKENS, HEAD_BLOCKS, OWN_BLOCKS = 16, 20, 10
NUM_BLOCKS = HEAD_BLOCKS + USERS * OWN_BLOCKS
"""All that users ask for."""
DEVICE_BLOCKS = 60
LAYERS, KV_HEADS = 16, 64  # half a megabyte a block
Start = Callable[[Path], AbstractContextManager[dict[str, str]]]
STORES: dict[str, tuple[Start, Callable[[], object]]] = {
    "file://": (directory, lambda: True),
    "redis://": (valkey, find_server),
    "s3://": (bucket, lambda: not SeaweedServer.missing()),
    "mooncake://": (mooncake, find_mooncake),
}
"""How each is started, and whether it can be."""
SETTINGS = {
    "KVBM_REMOTE_LOAD": "always",  # a model as small as this one is computed sooner
    "KVBM_REMOTE_WAIT_S": "60",  # and a busy machine brings nothing in two seconds
    "KVBM_REMOTE_DEADLINE_S": "60",
}


def prompts() -> list[list[int]]:
    """One of each user; one token more than whole blocks, as the last token is always computed."""
    draw = random.Random(33)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 250) for _ in range(count)]

    head = tokens(HEAD_BLOCKS * BLOCK_TOKENS)
    return [head + tokens(OWN_BLOCKS * BLOCK_TOKENS + 1) for _ in range(USERS)]


def ask(folder: Path, rounds: int, weights: bytes) -> int:
    """An engine that has nothing, is asked so often and ends: how many blocks the store has brought."""
    folder.mkdir()
    engine = KvbmEngine(
        folder,
        host_blocks=2 * NUM_BLOCKS,
        num_blocks=DEVICE_BLOCKS,
        block_size_tokens=BLOCK_TOKENS,
        max_model_len=512,
        max_batched_tokens=512,
        windows=(None,) * LAYERS,
        kv_heads=KV_HEADS,
        weights=weights,
    )
    with engine:
        for number in range(rounds):
            for user, prompt in enumerate(prompts()):
                engine.ask(f"{number} {user}", prompt, 1)
                engine.settle()
        engine.assert_clean()
        return int(engine.metric("kvbm_onboard_blocks_o2d"))


def found(kind: str) -> Iterator[int]:
    """How many of NUM_BLOCKS a second engine finds after one round, two and so on."""
    start, _ = STORES[kind]
    with tempfile.TemporaryDirectory(prefix="kvbm-sharing-") as name:
        folder = Path(name)
        with start(folder) as of_store, patch.dict(os.environ, SETTINGS | of_store):
            for rounds in range(1, ROUNDS + 1):
                weights = b"%d" % rounds  # by another name: each time the store has nothing
                ask(folder / f"first {rounds}", rounds, weights)
                yield ask(folder / f"second {rounds}", 1, weights)


def row(kind: str) -> list[str]:
    """Of the page's table."""
    return [f"`{kind}`", *(f"{100 * num_blocks / NUM_BLOCKS:.0f} %" for num_blocks in found(kind))]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=STORES, help="one kind of store")
    only = parser.parse_args().only
    kinds = [kind for kind, (_, can_start) in STORES.items() if only in (None, kind) and can_start()]
    table = Table("store", "1 round", *(f"{rounds} rounds" for rounds in range(2, ROUNDS + 1)))
    for kind in kinds:
        table.add_row(*row(kind))
    report_console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

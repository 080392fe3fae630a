"""Run by Dynamo's own Python: whether ``python -m MODULE ARGUMENTS`` would be taken.

Reads a JSON list of [[module, *arguments], environment]; writes one of [what each was refused with, or null;
where the KV events that Dynamo reads are published, if kvbm publishes them].
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

Answer = tuple[str | None, str | None]
_WORKERS: list[Any] = []
"""The ports that each keeps."""


def answer(argv: Sequence[str], env: Mapping[str, str]) -> Answer:
    """See above."""
    said = io.StringIO()
    os.environ.update(env)
    try:
        with contextlib.redirect_stderr(said):
            return None, parse(argv)
    except SystemExit:
        return said.getvalue(), None
    except Exception as error:
        return str(error), None
    finally:
        for name in env:
            del os.environ[name]


def parse(argv: Sequence[str]) -> str | None:
    """As the module does when it is run."""
    module, *arguments = argv
    if module == "dynamo.vllm":
        from dynamo.vllm.args import _uses_dynamo_connector, parse_args

        from kvbm.vllm_integration.consolidator_config import get_consolidator_endpoints
        from kvbm_core.events import ports

        engine_args = parse_args(arguments).engine_args
        if not _uses_dynamo_connector(engine_args):
            return None
        # Making vLLM's whole configuration takes ten seconds; these parts it takes over as they are.
        is_caching = engine_args.enable_prefix_caching is not False
        config = SimpleNamespace(
            kv_transfer_config=engine_args.kv_transfer_config,
            kv_events_config=engine_args.kv_events_config,
            cache_config=SimpleNamespace(enable_prefix_caching=is_caching),
            parallel_config=SimpleNamespace(data_parallel_size=engine_args.data_parallel_size),
        )
        ports.KEPT = ports.KeptPorts()  # each line is a process of its own, and all of them live
        _WORKERS.append(ports.KEPT)
        endpoints = get_consolidator_endpoints(config)
        return endpoints and endpoints[2]
    if module == "dynamo.frontend":
        from dynamo.frontend import main

        sys.argv = list(argv)
        main.parse_args()
        return None
    raise ValueError(f"who parses the arguments of {module}?")


if __name__ == "__main__":
    answers = [answer(argv, env) for argv, env in json.load(sys.stdin)]
    print("\n" + json.dumps(answers))

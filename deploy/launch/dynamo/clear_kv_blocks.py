#!/usr/bin/env python3
"""Asks Dynamo's workers to forget what they have cached: the device's prefix cache and kvbm's tiers.

    python3 deploy/launch/dynamo/clear_kv_blocks.py                    workers of aggregated serving
    python3 deploy/launch/dynamo/clear_kv_blocks.py --component prefill

Run it with the environment of the workers: ETCD_ENDPOINTS or DYN_FILE_KV, DYN_NAMESPACE. One line for each
worker; the exit status is 1 if one of them could not, for example because a request is running. Blocks in a
shared store stay there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from dynamo.common.utils.runtime import create_runtime
from dynamo.runtime.logging import configure_dynamo_logging


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Ask Dynamo's workers to forget what they have cached.")
    parser.add_argument("--component", default="backend", help="backend (the default) or prefill")
    options = parser.parse_args()
    configure_dynamo_logging()
    os.environ.pop("DYN_SYSTEM_PORT", None)  # a worker's
    endpoint = f"{os.environ.get('DYN_NAMESPACE', 'dynamo')}.{options.component}.clear_kv_blocks"
    return asyncio.run(clear(endpoint))


async def clear(endpoint: str) -> int:
    """Asks each instance of ``endpoint``, one after the other."""
    backend = os.environ.get("DYN_DISCOVERY_BACKEND", "etcd" if "ETCD_ENDPOINTS" in os.environ else "file")
    runtime, _ = create_runtime(backend, os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    try:
        client = await runtime.endpoint(endpoint).client()
        are_cleared = []
        for instance in await client.wait_for_instances():
            async for said in await client.direct({}, instance):
                answer = said.data()
                print(f"{instance}: {answer['status']}: {answer['message']}")
                are_cleared.append(answer["status"] == "success")
        return 0 if are_cleared and all(are_cleared) else 1
    finally:
        runtime.shutdown()


if __name__ == "__main__":
    sys.exit(main())

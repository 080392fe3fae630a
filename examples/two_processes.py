"""Two processes share what they computed, through a directory; a bucket or a server is another URL."""

import subprocess
import sys
import tempfile

import numpy as np

import kvbm

SPEC = kvbm.BlockSpec("my-model", shape=(2, 16, 64), dtype="float16", tokens=16)
PROMPT = list(range(64))


def open_shared(url: str) -> kvbm.BlockCache:
    """A cache with memory of its own, over the directory."""
    return kvbm.open_cache(SPEC, host_bytes=1 << 26, remote=url, remote_bytes=1 << 30)


def write(url: str) -> None:
    """What the other process runs."""
    blocks = np.full((4, *SPEC.shape), 7, SPEC.dtype)
    with open_shared(url) as cache:  # its end waits until the directory has all of it
        print(cache.put(PROMPT, blocks), "blocks written by another process")


def main() -> None:
    """Runs a writer, and reads what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}"
        subprocess.run([sys.executable, __file__, url], check=True)
        with open_shared(url) as cache:
            out = np.zeros((4, *SPEC.shape), SPEC.dtype)
            print(cache.get(PROMPT, out), "blocks read by this one:", bool((out == 7).all()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(sys.argv[1])
    else:
        main()

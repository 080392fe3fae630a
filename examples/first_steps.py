"""Blocks of a prompt are stored, found and brought back: the shortest program that does something."""

import numpy as np

import kvbm

spec = kvbm.BlockSpec("my-model", shape=(2, 16, 64), dtype="float16", tokens=16)
with kvbm.open_cache(spec, host_bytes=1 << 28) as cache:
    prompt = list(range(70))  # 4 full blocks of 16 tokens, and 6 more
    blocks = np.random.default_rng(1).random((4, *spec.shape)).astype(spec.dtype)
    cache.put(prompt, blocks)
    out = np.empty_like(blocks)
    num_blocks = cache.get([*prompt, 1, 2, 3], out)  # a prompt that goes on finds what it has in common
    print(num_blocks, "blocks came back:", np.array_equal(out, blocks))

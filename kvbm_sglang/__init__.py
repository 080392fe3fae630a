"""kvbm under SGLang's HiCache: pages of its host pools on a local disk. Experimental: see docs/sglang.md."""

"""Blocks of torch tensors, by keys of your own, that outlive the process on a disk."""

import tempfile

import torch

import kvbm

spec = kvbm.BlockSpec(
    "my-encoder", shape=(4, 128), dtype="bfloat16", tokens=1, revision="2026-11", layout="layers, hidden"
)
device = "cuda" if torch.cuda.is_available() else "cpu"

with tempfile.TemporaryDirectory() as folder:  # take a directory that stays, such as /var/cache/my-app
    with kvbm.open_cache(spec, host_bytes=1 << 26, disk=folder, disk_bytes=1 << 28) as cache:
        documents = {"report.pdf#1": torch.randn(4, 128), "report.pdf#2": torch.randn(4, 128)}
        blocks = torch.stack(list(documents.values())).to(device, torch.bfloat16)
        cache.put(list(documents), blocks, salt="tenant-a")

    with kvbm.open_cache(spec, host_bytes=1 << 26, disk=folder, disk_bytes=1 << 28) as cache:
        out = torch.empty_like(blocks)
        print("of another tenant:", cache.match(list(documents), salt="tenant-b"))
        print("of this one:", cache.get(list(documents), out, salt="tenant-a"), torch.equal(out, blocks))

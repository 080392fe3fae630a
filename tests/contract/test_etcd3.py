"""etcd3 0.12.0 on the protobuf that is installed, and on older and newer ones, against a real etcd."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.etcd_server import EtcdServer

pytestmark = pytest.mark.etcd

PROTOBUFS = ("==4.25.8", ">=5,<6", ">=6,<7", ">=7")
"""The lowest that kvbm's extra allows, and the last one of each that followed."""
PROGRAM = """
import json, sys, time
sys.path[:0] = sys.argv[2:]
begun_s = time.monotonic()
from kvbm_core.fleet.etcd import EtcdOptions, open_client
import google.protobuf
client = open_client(EtcdOptions((("127.0.0.1", int(sys.argv[1])),)), 0)
import_s = time.monotonic() - begun_s
lease = client.lease(5)
client.put("/a/1", b"\\x00\\xff", lease)
(answer,) = lease.refresh()
told = {
    "version": google.protobuf.__version__,
    "ttl": answer.TTL,
    "value": list(client.get("/a/1")[0]),
    "absent": client.get("/b")[0],
    "first": client.put_if_not_exists("/a/2", b"x", lease),
    "again": client.put_if_not_exists("/a/2", b"y"),
    "below": [about.key.decode() for _, about in client.get_prefix("/a/")],
    "status": bool(client.status().version),
}
lease.revoke()
told["left"] = [about.key.decode() for _, about in client.get_all()]
client.close()
assert import_s < 20, import_s
print(json.dumps(told))
"""
RIGHT = {
    "ttl": 5,
    "value": [0, 255],
    "absent": None,
    "first": True,
    "again": False,
    "below": ["/a/1", "/a/2"],
    "status": True,
    "left": [],
}


def check(etcd: EtcdServer, folder: Path | None = None) -> str:
    """The version that was used."""
    extra = [str(folder)] if folder is not None else []
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(etcd.port), *extra]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    version = str(told.pop("version"))
    assert told == RIGHT
    return version


def test_with_the_protobuf_that_is_installed(tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as etcd:
        check(etcd)


@pytest.mark.nightly("downloads four versions of protobuf; the one that is installed is tried always")
def test_with_every_protobuf_that_it_may_meet(tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as etcd:
        for wanted in PROTOBUFS:
            folder = tmp_path / wanted.strip("=<>,")
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
            subprocess.run([*pip, f"protobuf{wanted}"], check=True, timeout=120)
            version = check(etcd, folder)
            assert version.startswith(wanted.lstrip("=>").split(".")[0].split(",")[0]), (version, wanted)

"""``kvbm doctor`` finds planted faults of a machine, of what is installed and of settings."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import site
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import time
from typing import Any
from unittest.mock import patch

import pytest

from kvbm_core.cli.doctor import gpu
from kvbm_core.cli.doctor.catalog import OWN
from kvbm_core.cli.doctor.check import Check, Finding, Level, Subject, ok
from kvbm_core.cli.doctor.model import kv_bytes_per_token
from kvbm_core.cli.doctor.run import run_checks
from kvbm_core.config import KvbmSettings
from kvbm_core.fleet.keys import new_keys
from kvbm_core.storage.memory_room import MemoryRoom
from tests.engines.ports import HOST, free_port
from tests.policies import installed
from tests.unit.doctor_bench import CHECKS, ROOT, doctor, found, is_well, levels, look, mounted
from tests.unit.test_native_build import needs_compiler

ERROR, NOTE, WARNING = Level.ERROR, Level.NOTE, Level.WARNING


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting from outside."""
    for variable in (*KvbmSettings.env_names().values(), "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(variable, raising=False)


# ---------------------------------------------------------------- packages


@pytest.fixture(scope="module")
def bad_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Any]:
    """Exit status and answer of a command with NVIDIA's package in front, low limits, and without the native
    module: what is of a process, all in one.
    """
    folder = tmp_path_factory.mktemp("nvidia")
    for name in ("", "vllm_integration/", "vllm_integration/connector/"):
        (folder / "kvbm" / name).mkdir(parents=True)
        (folder / "kvbm" / name / "__init__.py").touch()
    limits = (
        "import resource\nresource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))"
    )
    environ = {"DYN_KVBM_CPU_CACHE_GB": "0.1", "KVBM_PEERS": "nixl", "KVBM_NATIVE": "0"}
    status, answer, _ = doctor(before=limits, path=(folder,), **environ)
    return status, answer


@pytest.mark.parametrize(
    ("check", "level", "seen", "remedy"),
    [
        ("package", "error", "is NVIDIA's", "pip uninstall -y kvbm"),
        ("locked-memory", "warning", "only 0.0655 MB may be locked", "--ulimit memlock=-1"),
        ("open-files", "warning", "only 512 files may be open", "raise it to 1,024"),
        ("native", "note", "KVBM_NATIVE switches the native module off", "unset it"),
    ],
)
def test_a_process_with_faults(
    check: str, level: str, seen: str, remedy: str, bad_process: tuple[int, Any]
) -> None:
    status, answer = bad_process
    (one,) = [one for one in answer["checks"] if one["check"] == check]
    (finding,) = one["findings"]
    assert status == answer["exit_code"] == 2 and one["level"] == finding["level"] == level
    assert seen in finding["seen"] and remedy in finding["remedy"]


def test_a_build_without_the_native_module_and_a_package_that_is_missing(tmp_path: Path) -> None:
    for package in ("kvbm_core", "kvbm_vllm", "kvbm_sglang", "kvbm_trtllm"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / package, tmp_path / "built" / package, ignore=ignored)
    others = tmp_path / "site-packages"
    others.mkdir()
    for folder in site.getsitepackages():
        for entry in Path(folder).iterdir():
            if not entry.name.startswith(("etcd3", "kvbm", "_kvbm", "nixl", "vllm", "__pycache__")):
                (others / entry.name).symlink_to(entry)
    built = str(tmp_path / "built")
    before = f"sys.path[:2] = []\nsys.path.insert(0, {built!r})\nsys.path.append({str(others)!r})"
    environ = {"ETCD_ENDPOINTS": f"http://{HOST}:{free_port()}"}
    status, answer, _ = doctor(before=before, flags=("-I", "-S"), **environ)
    text = json.dumps(answer)
    assert status == 2 and levels(answer)["native"] == "warning" and levels(answer)["extras"] == "error"
    assert "ETCD_ENDPOINTS needs etcd3" in text and "its extra etcd" in text and "a C compiler" in text
    assert levels(answer)["etcd"] == "error" and "etcd3 cannot be used" in text
    assert levels(answer)["engine"] == "warning"


def test_a_package_whose_library_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    why = "libibverbs.so.1: cannot open shared object file"
    (tmp_path / "mooncake" / "store.py").write_text(f"raise ImportError({why!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    found(
        look("extras", remote_url="mooncake://host:1"), ERROR, f"mooncake.store: {why}", "install libibverbs1"
    )
    sys.modules.pop("mooncake")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a package's version where Python looks first."""

    def installed(package: str, version: str) -> None:
        about = tmp_path / f"{package}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return installed


@pytest.mark.parametrize(
    ("package", "check", "version", "level"),
    [
        ("vllm", "vllm", "0.20.1", ERROR),
        ("sglang", "sglang", "0.5.4", ERROR),
        ("sglang", "sglang", "0.6.0", WARNING),
        ("tensorrt_llm", "trtllm", "0.21.0", ERROR),
    ],
)
def test_an_engine_of_another_version(
    package: str, check: str, version: str, level: Level, install: Callable[[str, str], None]
) -> None:
    install(package, version)
    found(look(check), level, version)


@pytest.mark.vllm
@pytest.mark.nightly("imports vLLM in a process of its own")
def test_an_engine_that_is_newer_and_fits(install: Callable[[str, str], None]) -> None:
    install("vllm", "0.99.0")
    found(look("vllm"), WARNING, "0.99.0 is newer", "its connector interface fits", "KVBM_VERIFY_ONBOARD=1")


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_an_engine_that_is_asked_for_and_not_there(engine: str) -> None:
    assert look(engine) == []
    found(look(engine, engine=engine), ERROR, "is not installed in this environment")


# ---------------------------------------------------------------- settings


def test_misspelled_and_vain_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_well(look("settings", cpu_cache_gb=1))
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GIB", "20")
    found(
        look("settings"), WARNING, "DYN_KVBM_CPU_CACHE_GIB is set but ignored", "mean DYN_KVBM_CPU_CACHE_GB?"
    )
    monkeypatch.delenv("DYN_KVBM_CPU_CACHE_GIB")
    found(look("settings", disk_to_device="nixl-gds"), WARNING, "KVBM_DISK_TO_DEVICE", "without a disk tier")
    found(look("settings", object_num_blocks=5), WARNING, "DYN_KVBM_OBJECT_NUM_BLOCKS=5", "ignored")


@pytest.mark.vllm
def test_settings_that_the_engine_does_not_heed() -> None:
    assert is_well(look("vllm", cpu_cache_gb=1))
    found(
        look("vllm", sync_onboard_bytes=5), WARNING, "KVBM_SYNC_ONBOARD_BYTES=5: has no effect here", "unset"
    )


def test_settings_that_only_one_of_an_engines_ways_heeds(install: Callable[[str, str], None]) -> None:
    install("sglang", "0.5.23")
    assert [finding.level for finding in look("sglang", cpu_cache_gb=1)] == [Level.OK, NOTE]
    found(look("sglang", cpu_cache_gb=1, audit_rate=0.5), WARNING, "KVBM_AUDIT_RATE")


def test_a_value_that_cannot_be_used() -> None:
    status, answer, said = doctor(DYN_KVBM_CPU_CACHE_GB="lots")
    (settings,) = answer["checks"]
    assert status == answer["exit_code"] == 2 and settings["level"] == "error"
    assert settings["findings"][0]["seen"] == "DYN_KVBM_CPU_CACHE_GB=lots"
    assert "nothing else was looked at" in said


def test_tiers() -> None:
    assert is_well(look("tiers", cpu_cache_gb=1, disk_cache_gb=5))
    found(look("tiers"), WARNING, "no cache tier", "DYN_KVBM_CPU_CACHE_GB=")
    room = MemoryRoom(9 * 10**9, 0, "a test")
    with patch("kvbm_core.cli.doctor.settings.available_memory", lambda root: room):
        found(look("tiers"), WARNING, "no cache tier", "DYN_KVBM_CPU_CACHE_GB=4,")
    found(look("tiers", cpu_cache_gb=4, disk_cache_gb=4), WARNING, "not larger than the host tier (4 GB)")
    found(look("tiers", remote_url="s3://bucket"), WARNING, "by way of host memory")


def test_secret_files(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    given = {"cpu_cache_gb": 1, "remote_url": "s3://bucket", "remote_secret_file": str(path)}
    found(look("secrets", **given), ERROR, "KVBM_REMOTE_SECRET_FILE", "cannot be read", "openssl rand")
    path.write_text("short")
    found(look("secrets", **given), ERROR, "holds 5 bytes")
    path.write_text("0123456789abcdef")
    assert is_well(look("secrets", **given))


def test_curve_keys(tmp_path: Path) -> None:
    assert look("curve-keys") == []
    _, secret = new_keys(tmp_path / "keys", "one")
    given = {"curve_key_file": str(secret), "curve_allowed": str(tmp_path / "keys")}
    assert is_well(look("curve-keys", **given))
    (tmp_path / "keys").chmod(0o777)
    found(look("curve-keys", **given), ERROR, "others may write there (mode 777)", "chmod go-w")
    (tmp_path / "keys").chmod(0o700)
    secret.chmod(0o644)
    found(look("curve-keys", **given), ERROR, "is not this user's alone (mode 644)", "chmod 600")


def test_orders_over_http(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token that nobody else has", encoding="ascii")
    token.chmod(0o600)
    over_http = {"control": "http", "control_token_file": str(token)}
    found(look("operators", control="http"), ERROR, "KVBM_CONTROL_TOKEN_FILE=(unset)", "openssl rand")
    assert is_well(look("operators", **over_http))
    address = look("operators", **over_http, control_http="0.0.0.0:6890")
    found(address, ERROR, "KVBM_CONTROL_HTTP=0.0.0.0:6890", "KVBM_FLEET_INSECURE=1")
    by_name = look("operators", **over_http, control_http="127.example.com:6890")
    found(by_name, ERROR, "KVBM_CONTROL_HTTP=127.example.com", "KVBM_FLEET_INSECURE=1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        found(
            look("ports", **over_http, control_http=where), ERROR, "KVBM_CONTROL_HTTP: port", "another port"
        )
    token.chmod(0o644)
    found(look("operators", **over_http), ERROR, str(token), "chmod 600")


def test_the_eviction_policy(tmp_path: Path) -> None:
    assert is_well(look("eviction"))
    found(look("eviction", eviction_policy="other"), ERROR, "KVBM_EVICTION_POLICY=other", "there are: ")
    with installed(tmp_path, listening="tests.policies:Listening", broken="tests.policies:broken"):
        found(look("eviction", eviction_policy="broken"), ERROR, "cannot be used: RuntimeError")
        assert is_well(look("eviction", eviction_policy="listening"))


def test_operators() -> None:
    found(look("operators", control="nats"), ERROR, "KVBM_CONTROL_OPERATORS=(unset)", "kvbm keys operator")
    found(look("operators", control_operators="UABC"), WARNING, "KVBM_CONTROL=nats")


# ---------------------------------------------------------------- machine


def test_a_host_tier_larger_than_memory() -> None:
    assert is_well(look("host-memory", cpu_cache_gb=0.01))
    found(look("host-memory", cpu_cache_gb=1e6), ERROR, "1e+06 GB", "lower DYN_KVBM_CPU_CACHE_GB")


def kernel(root: Path, **files: str) -> Path:
    """Files as a kernel has them; __ stands for a slash, and _- for an underscore."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_-", "_")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_huge_pages_that_are_off(tmp_path: Path) -> None:
    path = "sys__kernel__mm__transparent_-hugepage__enabled"
    found(
        look("huge-pages", root=kernel(tmp_path, **{path: "always madvise [never]\n"})),
        WARNING,
        "echo madvise",
    )
    assert is_well(look("huge-pages", root=kernel(tmp_path, **{path: "always [madvise] never\n"})))


def test_numa(tmp_path: Path) -> None:
    assert is_well(look("numa", root=tmp_path))
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node1").mkdir()
    assert is_well(look("numa", root=tmp_path))
    found(look("numa", root=tmp_path, disable_numa=True), WARNING, "2 NUMA nodes", "DYN_MEMORY_DISABLE_NUMA")
    (tmp_path / "proc/driver/nvidia/gpus/0000:1b:00.0").mkdir(parents=True)
    near = tmp_path / "sys/bus/pci/devices/0000:1b:00.0/local_cpulist"
    near.parent.mkdir(parents=True)
    near.write_text("5000-5003\n")
    found(look("numa", root=tmp_path), WARNING, "GPU at 0000:1b:00.0", "5000,5001,5002,5003")


def test_little_shared_memory(tmp_path: Path) -> None:
    found(look("shared-memory", root=tmp_path), WARNING, "No such file", "mount a tmpfs")
    with mounted(tmp_path / "dev/shm", "tmpfs", "size=64m"):
        found(look("shared-memory", root=tmp_path), WARNING, "/dev/shm has 0.07 GB", "--shm-size")


def test_the_place_of_sockets(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at(folder: Path) -> list[Finding]:
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        return look("sockets")

    assert is_well(at(short_path))
    (own := short_path / f"kvbm-{os.getuid()}").mkdir()
    own.chmod(0o777)
    found(at(short_path), WARNING, "not private to this user")
    found(at(short_path / ("long" * 30)), ERROR, "too long for the path of a socket")


def test_a_temporary_directory_that_is_read_only(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(short_path / "ro", "tmpfs", "ro"):
        monkeypatch.setattr("tempfile.tempdir", str(short_path / "ro"))
        found(look("sockets"), ERROR, "cannot meet there", "Read-only", "set TMPDIR")


class Dated(BaseHTTPRequestHandler):
    """A server whose clock is wrong."""

    ahead_s = 0.0

    def do_HEAD(self) -> None:
        self.send_response_only(403)
        self.send_header("Date", formatdate(time() + self.ahead_s, usegmt=True))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(("ahead_s", "level"), [(0, None), (120, WARNING), (-4000, ERROR)])
def test_a_clock_that_is_wrong(ahead_s: float, level: Level | None) -> None:
    handler = type("Ahead", (Dated,), {"ahead_s": ahead_s})
    with ThreadingHTTPServer((HOST, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://{HOST}:{server.server_port}"
        seen = look("clock", cpu_cache_gb=1, remote_url="s3://bucket", object_endpoint=endpoint)
        server.shutdown()
    if level is None:
        assert is_well(seen)
    else:
        found(seen, level, "behind" if ahead_s > 0 else "ahead of", "set", "right (chrony")


# ---------------------------------------------------------------- GPU, by a driver made for it

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return FAIL_INIT; }
int cuDriverGetVersion(int *v) { *v = 12080; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *name, int n, int d) { strncpy(name, "Planted GPU", n); return 0; }
int cuDeviceTotalMem_v2(size_t *b, int d) { *b = 80000000000ul; return 0; }
int cuDeviceGetPCIBusId(char *name, int n, int d) { strncpy(name, "0000:1B:00.0", n); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)8; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuMemHostRegister_v2(char *p, size_t n, unsigned f) { p[n - 1] = 1; return FAIL_PIN; }
int cuMemHostUnregister(void *p) { return 0; }
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Makes a driver's library with these faults the one that is found."""

    def plant(init: int = 0, pin: int = 0) -> None:
        path = tmp_path / f"libcuda-{init}-{pin}.so"
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            f"-DFAIL_INIT={init}",
            f"-DFAIL_PIN={pin}",
            "-xc",
            "-",
            "-o",
            str(path),
        ]
        subprocess.run(command, input=DRIVER.encode(), check=True)
        monkeypatch.setattr(gpu, "LIBRARY", str(path))

    yield plant


@needs_compiler
def test_a_gpu_and_its_faults(driver: object, tmp_path: Path) -> None:
    assert callable(driver)
    driver()
    (seen,) = look("gpu")
    assert seen == ok("Planted GPU, 80 GB, at 0000:1b:00.0 (driver for CUDA 12.8)")
    assert is_well(look("pinning"))
    driver(pin=2)
    found(look("pinning"), ERROR, "cuMemHostRegister_v2: CUDA error 2", "limit of memory")
    driver(init=803)
    found(look("gpu"), ERROR, "CUDA error 803 (driver and its library", "nvidia-smi")
    assert look("pinning") == []


def test_a_gpu_without_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIBRARY", "libnone.so")
    assert [finding.level for finding in look("gpu", root=tmp_path)] == [NOTE]
    (tmp_path / "proc/driver/nvidia/gpus/0000:1b:00.0").mkdir(parents=True)
    found(look("gpu", root=tmp_path), ERROR, "its driver's library is not", "--gpus all")


def test_gds_that_cannot_be(tmp_path: Path) -> None:
    assert look("gds", root=tmp_path) == []
    found(look("gds", root=tmp_path, disk_io="nixl-gds"), ERROR, "there is no NVIDIA GPU")
    (tmp_path / "proc/driver/nvidia/gpus/0000:1b:00.0").mkdir(parents=True)
    found(look("gds", root=tmp_path, disk_io="nixl-gds"), WARNING, "no nvidia-fs")
    (tmp_path / "proc/driver/nvidia-fs").mkdir()
    assert is_well(look("gds", root=tmp_path))


def test_a_plugin_of_nixl_that_is_asked_for_and_cannot_be_had() -> None:
    pytest.importorskip("nixl", reason="NOT RUN: NIXL's plugins: no nixl")
    findings = look("nixl", disk_io="nixl-gds-mt")
    found(findings, ERROR, "NIXL's GDS_MT plugin: it needs an NVIDIA GPU", "KVBM_DISK_IO=auto")
    assert ok("NIXL's POSIX plugin works") in findings


# ---------------------------------------------------------------- disk


def on_disk(name: str, directory: Path, gigabytes: float = 0.001, **more: object) -> list[Finding]:
    return look(name, disk_cache_dir=str(directory), disk_cache_gb=gigabytes, **more)


@pytest.mark.parametrize("name", ["disk-folder", "disk-space", "disk-direct", "disk-speed"])
def test_a_disk_that_is_well(name: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    directory = tmp_path / "not" / "there yet"
    findings = on_disk(name, directory)
    assert is_well(findings) and sorted(tmp_path.rglob("*")) == before
    assert look(name) == []
    if name == "disk-speed":
        speeds = re.findall(r"(?:writes|reads) (\S+) GB/s", findings[0].seen)
        assert len(speeds) == 2 and all(float(speed) > 0 for speed in speeds)


def test_a_read_only_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "ro", "tmpfs", "ro") as folder:
        found(on_disk("disk-folder", folder), ERROR, "Read-only file system", "that can be written")
        for name in ("disk-direct", "disk-speed"):
            (only,) = on_disk(name, folder)
            assert only.level is NOTE and "see disk-folder" in only.seen


def test_a_folder_that_others_can_write_to(tmp_path: Path) -> None:
    (tmp_path / "kvbm").mkdir()
    (tmp_path / "kvbm").chmod(0o777)
    found(on_disk("disk-folder", tmp_path), ERROR, "mode 777", "chmod go-w")
    (tmp_path / "kvbm").rmdir()
    (tmp_path / "kvbm").symlink_to("/etc")
    found(on_disk("disk-folder", tmp_path), ERROR, "or is no folder")


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found(on_disk("disk-folder", tmp_path / "file"), ERROR, "Not a directory")


def test_a_full_disk_and_one_in_memory(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "tmpfs", "size=1m") as folder:
        found(on_disk("disk-space", folder, 5.0), ERROR, "is to have 5 GB: 0.0 GB are free", "make room")
        found(on_disk("disk-folder", folder), WARNING, "in memory (tmpfs)")
        with (
            (folder / "filler").open("wb") as filler,
            pytest.raises(OSError, match=os.strerror(errno.ENOSPC)),
        ):
            while True:
                filler.write(bytes(1 << 16))
                filler.flush()
        found(on_disk("disk-direct", folder), ERROR, "No space left", "make room")
        assert [finding.level for finding in on_disk("disk-speed", folder)] == [NOTE]


def test_a_file_system_without_o_direct(tmp_path: Path) -> None:
    with mounted(tmp_path / "ram", "ramfs") as folder:
        seen = on_disk("disk-direct", folder)
    assert seen[0].level is WARNING and "O_DIRECT does not work" in seen[0].seen
    assert "KVBM_DISK_DISABLE_O_DIRECT" in seen[0].remedy


def test_a_file_system_where_space_cannot_be_reserved(tmp_path: Path) -> None:
    maker, image = shutil.which("mke2fs", path=f"/usr/sbin:{os.environ['PATH']}"), tmp_path / "image"
    if maker is None:
        pytest.skip("NOT RUN: a file system where space cannot be reserved: no mke2fs")
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run([maker, "-q", "-t", "ext2", str(image)], check=True, capture_output=True)
    with mounted(tmp_path / "old", "ext2", "loop", str(image)) as folder:
        found(
            on_disk("disk-direct", folder), WARNING, "cannot be reserved", "DYN_KVBM_DISK_ZEROFILL_FALLBACK=1"
        )
        assert is_well(on_disk("disk-direct", folder, disk_zerofill_fallback=True))


def test_what_kvbm_has_already_counts_as_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=8m") as folder:
        found(on_disk("disk-space", folder, 0.02), ERROR, "make room")
        path = folder / "kvbm" / "0123456789abcdef-0" / "rank-0-of-1.blocks"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(7 << 20))
        findings = on_disk("disk-space", folder, 0.007)
    assert is_well(findings) and "kvbm has 0.0 GB" in findings[0].seen


# ---------------------------------------------------------------- ports


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        ({"metrics": True, "metrics_port": 0}, WARNING),
        ({"leader_zmq_ack_port": 0}, ERROR),
        ({"events": "zmq", "events_endpoint": f"tcp://{HOST}:0"}, ERROR),
        ({"peers": "zmq", "cpu_cache_gb": 1, "peer_bind": f"{HOST}:0"}, ERROR),
    ],
    ids=["metrics", "leader", "events", "peers"],
)
def test_a_port_that_somebody_has(settings: dict[str, object], level: Level) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        given = {
            name: port
            if value == 0 and value is not False
            else str(value).replace(":0", f":{port}")
            if isinstance(value, str)
            else value
            for name, value in settings.items()
        }
        given.setdefault("events_replay_endpoint", f"tcp://{HOST}:{free_port()}")
        findings = look("ports", **given)
    found(findings, level, f"port {port}", f"is taken by process {os.getpid()} (", "running already")


def test_an_address_of_another_machine() -> None:
    given = {"events": "zmq", "events_endpoint": "tcp://192.0.2.1:7000"}
    replay = f"tcp://{HOST}:{free_port()}"
    found(look("ports", events_replay_endpoint=replay, **given), ERROR, "192.0.2.1", "of this machine")


def test_ports_that_are_free() -> None:
    assert look("ports") == []
    assert is_well(look("ports", metrics=True, metrics_port=free_port()))


# ---------------------------------------------------------------- models

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "num_attention_heads": 16,
    "hidden_size": 1024,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
LATENT = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}


def model_at(folder: Path, config: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (folder / "model.safetensors").touch()
    return str(folder)


def test_models(tmp_path: Path) -> None:
    assert look("model") == []
    dense = model_at(tmp_path / "dense", DENSE)
    (seen,) = look("model", model=dense, cpu_cache_gb=20)
    assert seen.level is Level.OK and "115 kB" in seen.seen and "174,386 tokens" in seen.seen
    found(look("model", model=dense, cpu_cache_gb=1), WARNING, "8,719 tokens", "40,960", "raise DYN_KVBM_CPU")
    hybrid = {**DENSE, "layer_types": ["linear_attention", "full_attention"]}
    said, _ = look("model", model=model_at(tmp_path / "hybrid", hybrid))
    assert said.level is NOTE and "besides attention" in said.seen and "docs/hybrid.md" in said.remedy
    found(look("model", model=model_at(tmp_path / "broken", "{")), ERROR, "no config.json that can be read")
    assert [finding.level for finding in look("model", model="no/such-model")] == [NOTE]
    assert [finding.level for finding in look("model", model="no-such-model")] == [NOTE]


def test_a_path_that_is_mistyped_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    for typo in ("./typo", "../typo", "~/no such model", f"{tmp_path}/typo", "models/typo", "a/b/c"):
        found(look("model", model=typo), ERROR, f"{typo} is not there", "name the model's folder")


def test_kv_bytes_of_a_token() -> None:
    assert kv_bytes_per_token(DENSE) == 2 * 28 * 8 * 128 * 2
    assert kv_bytes_per_token(LATENT) == 61 * (512 + 64) * 2
    assert kv_bytes_per_token({**DENSE, "hybrid_override_pattern": "M-*-"}) == 2 * 1 * 8 * 128 * 2
    assert kv_bytes_per_token({"num_hidden_layers": "many"}) == 0


# ---------------------------------------------------------------- how checks are run


def test_a_check_that_hangs_or_breaks_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def hangs(subject: Subject) -> Iterator[Finding]:
        never.wait()
        yield ok("too late")

    def breaks(subject: Subject) -> Iterator[Finding]:
        yield ok("first")
        raise RuntimeError("planted\nin two \x1b[31mlines")

    def works(subject: Subject) -> Iterator[Finding]:
        yield ok("well")

    heard: list[str] = []
    checks = [Check("hangs", "a thing", hangs, 0.2), Check("breaks", "", breaks), Check("works", "", works)]
    try:
        looked = run_checks(
            checks, Subject(KvbmSettings.from_env(None)), lambda one: heard.append(one.check.name)
        )
    finally:
        never.set()
    assert [one.level for one in looked] == [ERROR, WARNING, Level.OK]
    assert looked[0].findings[0].seen == "did not end within 0.2 s"
    assert looked[1].findings[1].seen == "could not be looked at: RuntimeError: planted in two ?[31mlines"
    assert sorted(heard) == ["breaks", "hangs", "works"]


def test_every_check_has_a_name_of_its_own_and_a_word_about_it() -> None:
    assert len(CHECKS) >= len(OWN) + 3
    names = [check.name for check in CHECKS.values()]
    assert len(set(names)) == len(names)
    assert all(
        check.about and check.about[0] != " " and not check.about.endswith(".") for check in CHECKS.values()
    )


def test_an_engine_that_there_is_not() -> None:
    command = [sys.executable, "-m", "kvbm_core", "doctor", "--engine", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "--engine none: write one of" in done.stderr and not done.stdout

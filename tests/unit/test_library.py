"""`import kvbm` as a library: what is named, put, found and brought back, and what is refused."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvbm
from kvbm_core.errors import Outcome
from tests.engines.valkey_server import ValkeyServer

ROOT = Path(__file__).resolve().parents[2]
SPEC = kvbm.BlockSpec("some-model", shape=(2, 4, 24), dtype="float16", tokens=4)
BLOCK_BYTES = 2 * 4 * 24 * 2
SLOT_BYTES = 4096  # with a lower tier: whole sectors
RECORD_BYTES = 8192  # on the disk: with a header
Block = npt.NDArray[np.float16]
OpenCache = Callable[..., kvbm.BlockCache]


def blocks_of(*seeds: int, spec: kvbm.BlockSpec = SPEC) -> npt.NDArray[np.float16]:
    """A block for each number, the same for the same one."""
    rows = [np.random.default_rng(seed).random(spec.shape) for seed in seeds]
    return np.array(rows).astype(spec.dtype)


def empty(num_blocks: int) -> npt.NDArray[np.float16]:
    """Nothing that a block could hold by chance."""
    return np.full((num_blocks, *SPEC.shape), -1, SPEC.dtype)


@pytest.fixture
def open_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenCache]:
    """``kvbm.open_cache`` with room for 64 blocks; closed at the end."""
    monkeypatch.setenv("KVBM_START_WAIT_S", "60")
    made: list[kvbm.BlockCache] = []

    def make(num_slots: int = 64, spec: kvbm.BlockSpec = SPEC, **more: object) -> kvbm.BlockCache:
        slot_bytes = SLOT_BYTES if more else BLOCK_BYTES
        host_bytes = num_slots * slot_bytes
        made.append(kvbm.open_cache(spec, host_bytes=host_bytes, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for cache in made:
        cache.close()


# ---------------------------------------------------------------- what comes back


def test_the_longest_prefix_comes_back_and_nothing_else_is_touched(open_cache: OpenCache) -> None:
    cache, tokens, blocks = open_cache(), list(range(14)), blocks_of(1, 2, 3)
    assert cache.put(tokens, blocks) == 3  # two tokens are no block
    assert cache.match(tokens) == 3 and cache.match(tokens[:7]) == 1 and cache.match([9, *tokens]) == 0
    out = empty(4)
    assert cache.get([*tokens[:8], 5, 5, 5, 5, *tokens[8:]], out) == 2
    assert np.array_equal(out[:2], blocks[:2]) and (out[2:] == -1).all()
    assert cache.get(np.array(tokens), out[:1]) == 1  # no more than there is room for
    assert cache.usage() == {"host": 3, "disk": 0}


def test_keys_of_ones_own_are_told_apart_from_tokens_and_from_each_other(open_cache: OpenCache) -> None:
    cache, out = open_cache(), empty(3)
    assert cache.put(["a", "b", b"a"], blocks_of(1, 2, 3)) == 3
    assert cache.get([b"a", "b", "a"], out) == 3
    assert np.array_equal(out, blocks_of(3, 2, 1))
    assert cache.match(["c", "a"]) == 0 and cache.match(["a", "c", "b"]) == 1
    assert cache.match([]) == cache.put([], empty(0)) == cache.get([], out) == 0


@pytest.mark.parametrize(
    "other",
    [
        kvbm.BlockSpec("other-model", SPEC.shape, SPEC.dtype, 4),
        kvbm.BlockSpec("some-model", SPEC.shape, SPEC.dtype, 4, revision="2"),
        kvbm.BlockSpec("some-model", SPEC.shape, SPEC.dtype, 4, layout="heads first"),
        kvbm.BlockSpec("some-model", (4, 2, 24), SPEC.dtype, 4),
        kvbm.BlockSpec("some-model", SPEC.shape, "int16", 4),
        kvbm.BlockSpec("some-model", SPEC.shape, SPEC.dtype, 2),
    ],
)
def test_another_spec_finds_nothing(open_cache: OpenCache, tmp_path: Path, other: kvbm.BlockSpec) -> None:
    shared = {"remote": f"file://{tmp_path}", "remote_bytes": 0}
    cache = open_cache(**shared)
    assert cache.put(["k"], blocks_of(1)) == 1 and cache.flush()
    assert open_cache(**shared).match(["k"]) == 1
    assert open_cache(spec=other, **shared).match(["k"]) == 0


def test_a_salt_keeps_tenants_apart(open_cache: OpenCache) -> None:
    cache, tokens = open_cache(), list(range(8))
    for number, salt in enumerate(["a", "b", None, ""]):
        assert cache.put(tokens, blocks_of(10 * number, 10 * number + 1), salt=salt) == 2
    for number, salt in enumerate(["a", "b", None, ""]):
        out = empty(2)
        assert cache.get(tokens, out, salt=salt) == 2
        assert np.array_equal(out, blocks_of(10 * number, 10 * number + 1))
    assert cache.match(tokens, salt="c") == 0


def test_a_block_never_changes(open_cache: OpenCache) -> None:
    cache, out = open_cache(), empty(1)
    assert cache.put(["k"], blocks_of(1)) == cache.put(["k"], blocks_of(2)) == 1
    assert cache.get(["k"], out) == 1 and np.array_equal(out, blocks_of(1))
    assert cache.clear()
    assert cache.match(["k"]) == 0 and cache.put(["k"], blocks_of(2)) == 1
    assert cache.get(["k"], out) == 1 and np.array_equal(out, blocks_of(2))


def test_arrays_may_lie_in_any_order(open_cache: OpenCache) -> None:
    cache, blocks = open_cache(), blocks_of(*range(6))
    assert cache.put(["a", "b", "c"], blocks[::2]) == 3
    wide = np.full((24, 3, 4, 2), -1, SPEC.dtype)
    assert cache.get(["a", "b", "c"], wide.transpose(1, 3, 2, 0)) == 3
    assert np.array_equal(wide.transpose(1, 3, 2, 0), blocks[::2])


def test_without_a_lower_tier_the_head_is_kept(open_cache: OpenCache) -> None:
    cache, tokens = open_cache(5), list(range(32))
    assert cache.put(tokens, blocks_of(*range(8))) == 5
    out = empty(8)
    assert cache.get(tokens, out) == 5 and np.array_equal(out[:5], blocks_of(*range(5)))


def test_with_a_disk_a_prompt_may_be_longer_than_the_host(open_cache: OpenCache, tmp_path: Path) -> None:
    cache, tokens = open_cache(5, disk=tmp_path, disk_bytes=100 * RECORD_BYTES), list(range(160))
    assert cache.put(tokens, blocks_of(*range(40))) == 40
    out = empty(40)
    assert cache.match(tokens) == 40
    assert cache.get(tokens, out) == 40 and np.array_equal(out, blocks_of(*range(40)))
    assert cache.flush()
    assert cache.usage() == {"host": 5, "disk": 40}
    assert cache.clear() and cache.usage() == {"host": 0, "disk": 0}


def test_a_store_may_have_more_than_the_host_holds(open_cache: OpenCache, tmp_path: Path) -> None:
    shared = {"remote": [f"file://{tmp_path}"], "remote_bytes": 0}
    tokens = list(range(160))
    with open_cache(6, **shared) as first:
        assert first.put(tokens, blocks_of(*range(40))) == 40
    second, out = open_cache(6, **shared), empty(40)
    assert second.match(tokens) == 3  # half of the host
    assert second.get(tokens, out) == 40 and np.array_equal(out, blocks_of(*range(40)))


# ---------------------------------------------------------------- torch


@pytest.mark.vllm
def test_tensors_of_any_kind_come_back(open_cache: OpenCache) -> None:
    import torch

    for number, dtype in enumerate((torch.bfloat16, torch.float8_e4m3fn, torch.float32)):
        name = str(dtype).removeprefix("torch.")
        cache = open_cache(spec=kvbm.BlockSpec(f"m{number}", (3, 8), name, 1))
        torch.manual_seed(number)
        blocks = torch.randn(8, 5, 3).to(dtype).permute(1, 2, 0)
        out = torch.zeros(5, 3, 8, dtype=torch.float32).to(dtype)
        assert cache.put(list("abcde"), blocks) == 5
        assert cache.get(list("abcde"), out) == 5
        assert torch.equal(out.view(torch.uint8), blocks.contiguous().view(torch.uint8))


@pytest.mark.vllm
def test_a_tensor_without_bytes_of_its_own_is_refused(open_cache: OpenCache) -> None:
    import torch

    cache = open_cache()
    with pytest.raises(ValueError, match="holds no bytes of its own"):
        cache.put(["a"], torch.zeros(1, *SPEC.shape, dtype=torch.float16, device="meta"))
    with pytest.raises(ValueError, match="dtype float32; this cache has blocks of float16"):
        cache.put(["a"], torch.zeros(1, *SPEC.shape))
    grad = torch.zeros(1, *SPEC.shape, dtype=torch.float16, requires_grad=True)
    assert cache.put(["a"], grad) == cache.get(["a"], grad) == 1


# ---------------------------------------------------------------- what is refused, in one line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "model=''"),
        ({"shape": ()}, r"shape=\(\)"),
        ({"shape": (2, 0)}, r"shape=\(2, 0\)"),
        ({"dtype": "float12"}, "dtype='float12'.*bfloat16"),
        ({"tokens": 0}, "tokens=0"),
    ],
)
def test_a_spec_that_cannot_be(change: dict[str, object], message: str) -> None:
    fields = {"model": "m", "shape": (2,), "dtype": "uint8", "tokens": 1, **change}
    with pytest.raises(kvbm.ConfigError, match=message) as caught:
        kvbm.BlockSpec(**fields)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    wrong: list[tuple[dict[str, object], str]] = [
        ({"host_bytes": 100}, "host_bytes=100: holds no block; one takes 384 bytes"),
        ({"host_bytes": 10**18}, "host_bytes=10+: needs 1000000000.00 GB of host memory but"),
        ({"disk": tmp_path}, "disk_bytes=0: holds no block; one takes 8192 bytes"),
        ({"disk_bytes": 10**6}, "disk_bytes=1000000: needs a directory"),
        ({"disk": file, "disk_bytes": 10**6}, "disk=/.*: .*directory"),
        ({"remote": f"file://{tmp_path}"}, "remote_bytes=None"),
        ({"remote": "gopher://x"}, "remote=gopher"),
        ({"remote": f"file://{file}/x", "remote_bytes": 0}, "remote=file:///.*: "),
    ]
    for arguments, message in wrong:
        with pytest.raises(kvbm.ConfigError, match=message) as caught:
            kvbm.open_cache(SPEC, **{"host_bytes": 10**6, **arguments})  # type: ignore[arg-type]
        assert re.fullmatch("kvbm: .*", str(caught.value))
    monkeypatch.setenv("DYN_KVBM_DISK_CACHE_GB", "1")  # sizes and places are not the environment's
    monkeypatch.setenv("KVBM_REMOTE_URL", f"file://{tmp_path}/shared")
    with kvbm.open_cache(SPEC, host_bytes=10**6) as cache:
        cache.put(["a"], blocks_of(1))
    assert not (tmp_path / "shared").exists() and not (tmp_path / "kvbm").exists()


def test_arguments_that_do_not_fit(open_cache: OpenCache) -> None:
    cache, good = open_cache(), blocks_of(1)
    constant = np.broadcast_to(good, (1, *SPEC.shape))
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, r"write \[key\]", lambda: cache.match("key")),
        (TypeError, "keys and tokens are mixed", lambda: cache.match(["a", 1])),  # type: ignore[list-item]
        (ValueError, "a key is there twice", lambda: cache.put(["a", "a"], blocks_of(1, 2))),
        (ValueError, "unsigned 32 bit", lambda: cache.match([1, 2, 3, -4])),
        (ValueError, "unsigned 32 bit", lambda: cache.match([1, 2, 3, 1.5])),  # type: ignore[list-item]
        (ValueError, "flat list", lambda: cache.match(np.zeros((4, 4), np.int64))),
        (ValueError, "2 blocks have a name, and blocks has only 1", lambda: cache.put(["a", "b"], good)),
        (ValueError, "has dtype float32", lambda: cache.put(["a"], good.astype("f4"))),
        (ValueError, r"shape \(2, 4, 24\)", lambda: cache.put(["a"], good[0])),
        (ValueError, "another order", lambda: cache.put(["a"], good.astype(">f2"))),
        (ValueError, "cannot be written to", lambda: cache.get(["a"], constant)),
        (TypeError, "out is a NumPy array or a torch tensor, not list", lambda: cache.get(["a"], [1])),
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert cache.usage()["host"] == 0


def test_a_closed_cache_says_so(open_cache: OpenCache) -> None:
    cache = open_cache()
    cache.close()
    cache.close()
    for call in (lambda: cache.match(["a"]), cache.usage, cache.flush, cache.clear):
        with pytest.raises(RuntimeError, match="this cache is closed"):
            call()


# ---------------------------------------------------------------- threads, processes, ends


def test_threads_see_whole_blocks_only(open_cache: OpenCache, tmp_path: Path, seed: int) -> None:
    """Few slots and many threads: what comes back is right, whatever was evicted under way."""
    cache = open_cache(4, disk=tmp_path, disk_bytes=16 * RECORD_BYTES)
    wrong: list[str] = []

    def work(number: int) -> None:
        random, out = Random(f"{seed}-{number}"), empty(3)
        for _ in range(60):
            chain = random.randrange(6)
            tokens, seeds = [chain] * 12, (10 * chain, 10 * chain + 1, 10 * chain + 2)
            if random.random() < 0.4:
                cache.put(tokens, blocks_of(*seeds), timeout_s=0.2)
            found = cache.get(tokens, out, timeout_s=0.2)
            if not np.array_equal(out[:found], blocks_of(*seeds)[:found]):
                wrong.append(f"thread {number}: chain {chain}")

    threads = [threading.Thread(target=work, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.put([1] * 12, blocks_of(10, 11, 12)) == 3 and cache.match([1] * 12) == 3  # not stuck
    cache._tiers.check_integrity()
    assert len(cache._stage._free) == cache._stage.num_blocks


def test_closing_waits_for_calls_and_keeps_what_was_put(open_cache: OpenCache, tmp_path: Path) -> None:
    disk = {"disk": tmp_path, "disk_bytes": 200 * RECORD_BYTES}
    cache, tokens = open_cache(4, **disk), list(range(400))
    begun, num_put = threading.Event(), list[int]()
    store = cache._tiers.store

    def note(*arguments: object, **more: object) -> None:
        begun.set()
        store(*arguments, **more)  # type: ignore[arg-type]

    cache._tiers.store = note  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: num_put.append(cache.put(tokens, blocks_of(*range(100)))))
    thread.start()
    assert begun.wait(60)
    cache.close()
    thread.join()
    assert num_put == [100]
    assert open_cache(4, **disk).match(tokens) == 100


def test_a_failed_load_is_a_miss(open_cache: OpenCache, tmp_path: Path) -> None:
    with open_cache(8, disk=tmp_path, disk_bytes=64 * RECORD_BYTES) as cache:
        assert cache.put(["a", "b", "c"], blocks_of(1, 2, 3)) == 3
    (file,) = tmp_path.rglob("*.blocks")
    content = bytearray(file.read_bytes())
    at = content.index(blocks_of(2)[0].tobytes())
    content[at + 5] ^= 1
    file.write_bytes(content)
    again, out = open_cache(8, disk=tmp_path, disk_bytes=64 * RECORD_BYTES), empty(3)
    assert again.get(["a", "b", "c"], out) == 1  # not the damaged one, nor what comes behind it
    assert np.array_equal(out[:1], blocks_of(1)) and (out[1:] == -1).all()
    assert again.match(["b"]) == 0 and again.match(["c"]) == 1


def run(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A process of its own, with the same packages."""
    environ = {**os.environ, "KVBM_START_WAIT_S": "60", **environment}
    command = [sys.executable, "-c", f"{PRELUDE}\n{program}", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environ, cwd=ROOT
    )


PRELUDE = """
import sys, kvbm
from tests.unit.test_library import SPEC, blocks_of
"""
SERVE = """
cache = kvbm.open_cache(SPEC, host_bytes=65536, disk=sys.argv[1], disk_bytes=100000)
assert cache.put(list(range(40)), blocks_of(*range(10))) == 10 and cache.flush()
print("ready", flush=True)
sys.stdin.read()
"""


def test_after_kill_9_the_next_process_finds_the_disk_warm(open_cache: OpenCache, tmp_path: Path) -> None:
    process = run(SERVE, str(tmp_path))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    beside = open_cache(disk=tmp_path, disk_bytes=100000)
    assert beside.match(list(range(40))) == 0  # while that one lives, its part of the disk is its own
    beside.close()
    process.kill()
    process.communicate()
    cache, out = open_cache(disk=tmp_path, disk_bytes=100000), empty(10)
    assert cache.get(list(range(40)), out) == 10 and np.array_equal(out, blocks_of(*range(10)))


WRITE = """
with kvbm.open_cache(SPEC, host_bytes=65536, remote=sys.argv[1], remote_bytes=0) as cache:
    for number in range(20):
        assert cache.put([number] * 8, blocks_of(number, number + 100)) == 2
        print(number, flush=True)
"""


def test_processes_share_through_a_directory_while_both_live(open_cache: OpenCache, tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    cache, out = open_cache(remote=url, remote_bytes=0), empty(2)
    process = run(WRITE, url)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and output.split() == [str(number) for number in range(20)]
    for number in range(20):
        assert cache.get([number] * 8, out) == 2
        assert np.array_equal(out, blocks_of(number, number + 100))


@pytest.mark.valkey
def test_a_server_is_another_url_and_one_that_dies_costs_misses(
    open_cache: OpenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(range(80))
    with ValkeyServer(tmp_path) as server:
        monkeypatch.setenv("KVBM_REMOTE_PASSWORD_FILE", server.login().password_file)
        first, second = open_cache(remote=server.url), open_cache(remote=server.url)
        assert first.put(tokens, blocks_of(*range(20))) == 20 and first.flush()
        out = empty(20)
        assert second.get(tokens, out) == 20 and np.array_equal(out, blocks_of(*range(20)))
        third = open_cache(remote=server.url)
    assert third.get(tokens, out) == 0
    assert third.put(tokens, blocks_of(*range(20))) == 20 and third.get(tokens, out) == 20


FORGETS = """
cache = kvbm.open_cache(SPEC, host_bytes=65536, disk=sys.argv[1], disk_bytes=100000)
cache.put([1] * 4, blocks_of(1))
pid = __import__("os").fork()
if not pid:
    try:
        cache.match([1] * 4)
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit()
__import__("os").waitpid(pid, 0)
print("over", flush=True)
"""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_forgets_to_close_ends_and_a_fork_is_told(tmp_path: Path) -> None:
    output, _ = (process := run(FORGETS, str(tmp_path))).communicate(timeout=120)
    assert process.returncode == 0
    assert re.fullmatch(r"kvbm: process \d+ opened this cache; after a fork, .*\nover\n", output)


def test_a_cache_that_nobody_has_any_more_ends(tmp_path: Path) -> None:
    before = threading.active_count()
    cache = kvbm.open_cache(SPEC, host_bytes=65536, disk=tmp_path, disk_bytes=100000)
    assert threading.active_count() > before
    del cache
    gc.collect()
    assert threading.active_count() == before
    with kvbm.open_cache(SPEC, host_bytes=65536, disk=tmp_path, disk_bytes=100000):
        assert len(list((tmp_path / "kvbm").iterdir())) == 1  # the same folder: the first one gave it up


# ---------------------------------------------------------------- the module


def test_importing_kvbm_loads_nothing_that_it_does_not_need() -> None:
    program = (
        "import sys, kvbm\n"
        "def have(): return [m for m in ('numpy', 'pydantic', 'zmq', 'torch', 'vllm') if m in sys.modules]\n"
        "print(have(), len([m for m in sys.modules if m.startswith('kvbm_core.')]))\n"
        "print(kvbm.open_cache.__name__, 'torch' in sys.modules)\n"
        "print(set(kvbm.__all__) <= set(dir(kvbm)), hasattr(kvbm, 'nothing'))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "[] 0\nopen_cache False\nTrue False\n", result.stderr


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("first_steps", "4 blocks came back: True\n"),
        (
            "two_processes",
            "4 blocks written by another process\n4 blocks read by this one: True\n",
        ),
        pytest.param(
            "torch_and_disk",
            "of another tenant: 0\nof this one: 2 True\n",
            marks=pytest.mark.vllm,  # which brings torch
        ),
    ],
)
def test_the_examples_run_as_they_are(name: str, output: str) -> None:
    path = ROOT / "examples" / f"{name}.py"
    result = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == output


def test_the_page_shows_the_examples() -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert len(examples) == 3
    for path in examples:
        code = path.read_text(encoding="utf-8").partition('"""\n\n')[2]
        assert f"```python\n{code}```" in page, path.name


def test_an_outcome_that_is_no_success_keeps_nothing(open_cache: OpenCache) -> None:
    """A store that was rejected: nothing is there, and the number says so."""
    cache = open_cache()

    def reject(keys: Any, blocks: Any, tell: Any, **more: Any) -> None:
        tell(Outcome.REJECTED)

    cache._tiers.store = reject  # type: ignore[assignment,method-assign]
    assert cache.put(["a", "b"], blocks_of(1, 2)) == 0 and cache.match(["a"]) == 0

"""The native module and the Python beside it, against hashlib and numpy on random inputs."""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.blocks.departures import note_in_python
from kvbm_core.native import Bytes, Ids, native
from kvbm_core.storage.remote.names import plain_names
from kvbm_core.tokens.chain import chain_in_python, pack_in_python
from kvbm_core.transfer.executors.memcpy import PiecePairs, copy_in_python, copy_natively

Chain = Callable[[bytes, bytes, bytes, int], list[bytes]]
Pack = Callable[[object], bytes]
Copy = Callable[[PiecePairs, Ids, Ids], None]
Names = Callable[[Sequence[bytes], str, int], list[str]]

needs_native = pytest.mark.skipif(
    native is None,
    reason="NOT RUN: the native module (no C compiler when kvbm was installed, or KVBM_NATIVE=0)",
)


def native_function(name: str) -> object:
    """A function of the module by its name; in a test that is skipped where there is no module."""
    return pytest.param(getattr(native, name, None), id=name, marks=needs_native)


def copy_with_native(pieces: PiecePairs, dst_ids: Ids, src_ids: Ids) -> None:
    assert native is not None
    copy_natively(native, pieces, dst_ids, src_ids)


CHAINS = [
    pytest.param(chain_in_python, id="python"),
    native_function("chain"),
    native_function("chain_portable"),
]
PACKS = [pytest.param(pack_in_python, id="python"), native_function("pack_u32")]
NAMES = [pytest.param(plain_names, id="python"), native_function("record_names")]
NOTES = [pytest.param(note_in_python, id="python"), native_function("note_departures")]


def native_copy(name: str) -> object:
    """As ``copy_with_native``, the CPU's best way or one that another CPU would choose."""

    def copy(pieces: PiecePairs, dst_ids: Ids, src_ids: Ids) -> None:
        for dst, src in pieces:
            getattr(native, name)(dst, dst_ids, src, src_ids)

    return pytest.param(copy, id=name, marks=needs_native)


COPIES = [
    pytest.param(copy_in_python, id="python"),
    pytest.param(copy_with_native, id="native", marks=needs_native),
    native_copy("copy_blocks_plain"),
    native_copy("copy_blocks_streaming"),
]

# ---------------------------------------------------------------- chain


def chain_by_hashlib(parent: bytes, header: bytes, tokens: bytes, step: int) -> list[bytes]:
    digests = []
    for start in range(0, len(tokens), step):
        digest = hashlib.sha256()
        for part in (header, parent, tokens[start : start + step]):
            digest.update(part)
        parent = digest.digest()
        digests.append(parent)
    return digests


@pytest.mark.parametrize("chain", CHAINS)
@given(
    parent=st.binary(min_size=32, max_size=32),
    header=st.binary(max_size=130),
    step=st.integers(1, 200),
    num_blocks=st.integers(0, 4),
    data=st.data(),
)
def test_chain(
    chain: Chain, *, parent: bytes, header: bytes, step: int, num_blocks: int, data: st.DataObject
) -> None:
    tokens = data.draw(st.binary(min_size=step * num_blocks, max_size=step * num_blocks))
    expected = chain_by_hashlib(parent, header, tokens, step)
    assert chain(parent, header, tokens, step) == expected
    assert chain(parent, header, bytearray(tokens), step) == expected


@pytest.mark.parametrize("chain", CHAINS)
def test_every_length_of_a_message_is_padded_right(chain: Chain) -> None:
    tokens = bytes(range(256)) * 2
    for step in range(1, 200):
        part = tokens[: 2 * step]
        assert chain(b"p" * 32, b"", part, step) == chain_by_hashlib(b"p" * 32, b"", part, step), step


@pytest.mark.parametrize("chain", CHAINS)
def test_long_chains_in_several_threads(chain: Chain) -> None:
    """Long enough for the GIL to be given away."""
    inputs = [np.random.default_rng(seed).bytes(256 << 10) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda tokens: chain(b"p" * 32, b"h", tokens, 64), inputs))
    assert results == [chain_by_hashlib(b"p" * 32, b"h", tokens, 64) for tokens in inputs]


@pytest.mark.parametrize("chain", CHAINS[1:])
def test_chain_refuses_what_is_no_chain(chain: Chain) -> None:
    for parent, tokens, step in ((b"p" * 31, b"1234", 4), (b"p" * 32, b"12345", 4), (b"p" * 32, b"1234", 0)):
        with pytest.raises(ValueError, match="bytes"):
            chain(parent, b"", tokens, step)
    with pytest.raises(ValueError, match="whole blocks"):
        chain(b"p" * 32, b"", b"1234", -(2**63))
    assert chain(b"p" * 32, b"", b"", 2**63 - 1) == []
    with pytest.raises(TypeError):
        chain(b"p" * 32, b"", "1234", 4)  # type: ignore[arg-type]


# ---------------------------------------------------------------- pack_u32


class Index:
    """A number by ``__index__``, like numpy's; it may do something first."""

    def __init__(self, value: int, first: Callable[[], object] = lambda: None) -> None:
        self.value, self.first = value, first

    def __index__(self) -> int:
        self.first()
        return self.value


@pytest.mark.parametrize("pack", PACKS)
@given(
    tokens=st.lists(
        st.integers(0, 2**32 - 1) | st.booleans() | st.sampled_from([np.uint32(7), np.int64(2**31)])
    )
)
def test_pack(pack: Pack, tokens: list[int]) -> None:
    expected = struct.pack(f"<{len(tokens)}I", *map(int, tokens))
    assert pack(tokens) == expected
    assert pack(tuple(tokens)) == expected
    assert pack([Index(int(token)) for token in tokens]) == expected


@pytest.mark.parametrize("pack", PACKS)
def test_pack_takes_any_sequence(pack: Pack) -> None:
    assert pack(range(3)) == pack(np.arange(3)) == struct.pack("<3I", 0, 1, 2)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("token", [-1, 2**32, 2**64, -(2**70), Index(-1)])
def test_pack_refuses_what_does_not_fit(pack: Pack, token: object) -> None:
    with pytest.raises(OverflowError):
        pack([1, token, 2])


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("token", [1.5, np.float64(1), "1", None, b"1", [1]])
def test_pack_refuses_what_is_no_number(pack: Pack, token: object) -> None:
    with pytest.raises(TypeError):
        pack([1, token, 2])


@pytest.mark.parametrize("pack", PACKS[1:])
def test_pack_survives_a_list_that_shrinks_while_it_is_read(pack: Pack) -> None:
    tokens: list[object] = [1, 2, 3]
    tokens[0] = Index(1, tokens.clear)
    with pytest.raises(ValueError, match="fewer"):
        pack(tokens)


# ---------------------------------------------------------------- record_names

KEYS = st.binary(min_size=32, max_size=32) | st.binary(min_size=33, max_size=33)


@pytest.mark.parametrize("make_names", NAMES)
@given(keys=st.lists(KEYS), folder=st.from_regex(r"\A[a-z0-9/._-]*/\Z"), num_blocks=st.integers(1, 2**32 - 1))
def test_names(make_names: Names, keys: list[bytes], folder: str, num_blocks: int) -> None:
    groups = [key[32] if len(key) > 32 else 0 for key in keys]
    digits = [key[:32].hex() for key in keys]
    ends = [
        f"{all_of[:3]}/{all_of}-{group}x{num_blocks}" for all_of, group in zip(digits, groups, strict=True)
    ]
    expected = [folder + end for end in ends]
    assert make_names(keys, folder, num_blocks) == expected
    assert make_names(tuple(keys), folder, num_blocks) == expected


@needs_native
@pytest.mark.parametrize(
    ("keys", "folder", "error"),
    [
        ([bytes(31)], "a/", ValueError),
        ([bytes(32), bytes(34)], "a/", ValueError),
        ([bytearray(32)], "a/", TypeError),
        (["0" * 32], "a/", TypeError),
        ([bytes(32)], "é/", ValueError),
        ([bytes(32)], "日/", ValueError),
        ([bytes(32)], b"a/", TypeError),
        (7, "a/", TypeError),
    ],
)
def test_the_native_names_refuse_what_is_no_key_or_folder(keys: Any, folder: Any, error: type) -> None:
    assert native is not None
    with pytest.raises(error):
        native.record_names(keys, folder, 1)


@pytest.mark.parametrize("note", NOTES)
@given(keys=st.lists(KEYS, max_size=80), place_bits=st.integers(3, 6), why=st.integers(1, 6))
def test_departures_are_noted(
    note: Callable[..., None], keys: list[bytes], place_bits: int, why: int
) -> None:
    num_places = 1 << place_bits
    rows = np.zeros((num_places, 2), np.uint64)
    idle_s = np.arange(len(keys), dtype=np.float32)
    expected = rows.copy()
    for number, key in enumerate(keys):
        end = int.from_bytes(key[-8:], sys.byteorder)
        expected[end % num_places, 0] = end - end % num_places + why
        expected[end % num_places].view(np.float32)[2:] = 7.5, number
    note(rows, keys, why, 7.5, idle_s)
    assert np.array_equal(rows, expected)
    note(rows, tuple(keys), why, 7.5, idle_s)
    assert np.array_equal(rows, expected)


@needs_native
@pytest.mark.parametrize(
    ("num_places", "keys", "why", "num_idle", "error"),
    [
        (8, [bytes(32), bytes(7)], 1, 2, TypeError),
        (8, [bytearray(32)], 1, 1, TypeError),
        (8, ["0" * 32], 1, 1, TypeError),
        (8, 7, 1, 0, TypeError),
        (8, [bytes(32)], 1, 0, ValueError),
        (8, [], 1, 1, ValueError),
        (8, [bytes(32)], 8, 1, ValueError),
        (0, [bytes(32)], 0, 1, ValueError),
        (6, [bytes(32)], 1, 1, ValueError),
    ],
)
def test_native_departures_refuse_what_does_not_fit(
    num_places: int, keys: Any, why: int, num_idle: int, error: type
) -> None:
    assert native is not None
    rows = np.zeros((num_places, 2), np.uint64)
    with pytest.raises(error):
        native.note_departures(rows, keys, why, 0.0, np.zeros(num_idle, np.float32))


@needs_native
def test_native_departures_do_not_write_to_what_is_read_only() -> None:
    assert native is not None
    rows = np.zeros((8, 2), np.uint64)
    rows.flags.writeable = False
    with pytest.raises((TypeError, BufferError, ValueError)):
        native.note_departures(rows, [bytes(32)], 1, 0.0, np.zeros(1, np.float32))


# ---------------------------------------------------------------- copy_blocks


@st.composite
def block_arrays(draw: st.DrawFn, num_pieces: int, num_bytes: int) -> tuple[Bytes, Bytes]:
    """Random memory, and ``[piece, block, byte]`` over all of it with any order of the axes and gaps
    between.
    """
    num_blocks = draw(st.integers(1, 6))
    pieces_inside, gaps = draw(st.booleans()), [draw(st.integers(0, 3)) for _ in range(2)]
    inner = num_bytes + gaps[0]
    outer = inner * (num_pieces if pieces_inside else num_blocks) + gaps[1]
    strides = (inner, outer, 1) if pieces_inside else (outer, inner, 1)
    start = draw(st.integers(0, 9))
    size = start + outer * (num_blocks if pieces_inside else num_pieces)
    memory = np.frombuffer(draw(st.randoms(use_true_random=False)).randbytes(size), np.uint8).copy()
    shape = (num_pieces, num_blocks, num_bytes)
    view: Bytes = np.ndarray(shape, np.uint8, buffer=memory, offset=start, strides=strides)
    return memory, view[:, ::-1] if draw(st.booleans()) else view


@pytest.mark.parametrize("copy", COPIES)
@given(num_pieces=st.integers(1, 3), num_bytes=st.integers(1, 70) | st.integers(1000, 1400), data=st.data())
def test_copy(copy: Copy, num_pieces: int, num_bytes: int, data: st.DataObject) -> None:
    memory, dst = data.draw(block_arrays(num_pieces, num_bytes))
    _, src = data.draw(block_arrays(num_pieces, num_bytes))
    targets = data.draw(st.lists(st.integers(0, dst.shape[1] - 1), unique=True))
    sources = [data.draw(st.integers(0, src.shape[1] - 1)) for _ in targets]
    before = memory.copy()
    written = np.zeros_like(memory)
    place = dst.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    mark: Bytes = np.ndarray(dst.shape, np.uint8, buffer=written, offset=place, strides=dst.strides)
    mark[:, targets] = 1
    copy([(dst, src)], np.array(targets, np.int64), np.array(sources, np.int64))
    assert (dst[:, targets] == src[:, sources]).all()
    assert (memory == before)[written == 0].all(), "bytes of no target block were written"


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("num_bytes", [1, 1023, 1024, 4095, 4096, 20_000, (2 << 20) + 1])
def test_copy_of_large_pieces_for_several_lanes(copy: Copy, num_bytes: int) -> None:
    random = np.random.default_rng(num_bytes)
    sources = [random.integers(0, 256, (2, 5, num_bytes), dtype=np.uint8) for _ in range(2)]
    targets = [np.zeros((2, 4, num_bytes), np.uint8) for _ in sources]
    copy(list(zip(targets, sources, strict=True)), np.array([3, 0, 1]), np.array([4, 2, 0]))
    for dst, src in zip(targets, sources, strict=True):
        assert (dst[:, [3, 0, 1]] == src[:, [4, 2, 0]]).all() and not dst[:, 2].any()


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("shift_bytes", [-65, -1, 0, 1, 64])
def test_a_block_may_overlap_its_target(copy: Copy, shift_bytes: int) -> None:
    memory = np.random.default_rng(1).integers(0, 256, 5200, dtype=np.uint8)
    content = memory[100:5100].copy()
    src, dst = (
        memory[100:5100].reshape(1, 1, 5000),
        memory[100 + shift_bytes : 5100 + shift_bytes].reshape(1, 1, 5000),
    )
    copy([(dst, src)], np.array([0]), np.array([0]))
    assert (dst == content).all()


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("wrong", [-1, 5, 2**62, -(2**63)])
def test_copy_checks_every_block_before_it_writes(copy: Copy, wrong: int) -> None:
    dst, src = np.zeros((2, 5, 8), np.uint8), np.ones((2, 5, 8), np.uint8)
    good, bad = np.array([0, 1, 2]), np.array([0, 1, wrong])
    for dst_ids, src_ids in ((good, bad), (bad, good)):
        with pytest.raises(IndexError, match=r"not in 0\.\.4"):
            copy([(dst, src)], dst_ids, src_ids)
    assert not dst.any()


@pytest.mark.parametrize("copy", COPIES)
def test_copy_refuses_what_does_not_fit(copy: Copy) -> None:
    dst, ids = np.zeros((2, 5, 8), np.uint8), np.array([0, 1])
    for src in (np.ones((1, 5, 8), np.uint8), np.ones((2, 5, 7), np.uint8)):
        with pytest.raises(ValueError, match="cannot be copied"):
            copy([(dst, src)], ids, ids)
    with pytest.raises(ValueError, match="cannot be copied"):
        copy([(dst, dst.copy())], ids, ids[:1])
    fixed = np.zeros((2, 5, 8), np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy([(fixed, dst)], ids, ids)
    copy([(dst, dst.copy())], ids[:0], ids[:0])
    assert not dst.any()


@needs_native
def test_the_native_copy_refuses_arrays_of_another_kind() -> None:
    dst, src, ids = np.zeros((2, 5, 8), np.uint8), np.ones((2, 5, 8), np.uint8), np.array([0, 1])
    wide, planes = np.ones((2, 5, 16), np.uint8), np.ones((5, 8), np.uint8)
    for other in (wide[:, :, ::2], wide.view(np.uint16), planes):
        with pytest.raises(ValueError, match="neighbouring bytes"):
            copy_with_native([(dst, other)], ids, ids)
    for wrong_ids in (ids.astype(np.int32), ids.astype(np.float64), ids.astype(np.uint64), ids.reshape(1, 2)):
        with pytest.raises(ValueError, match="int64"):
            copy_with_native([(dst, src)], wrong_ids, wrong_ids)
    with pytest.raises((ValueError, BufferError)):
        copy_with_native([(dst, src)], np.array([0, 9, 1])[::2], ids)
    with pytest.raises(TypeError):
        copy_with_native([(dst, None)], ids, ids)  # type: ignore[list-item]
    assert not dst.any()

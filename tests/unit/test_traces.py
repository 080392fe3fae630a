"""Files of requests: three formats, and one line for what is none."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.replay.machine import reusable_tokens
from kvbm_core.replay.trace import Trace, TraceError, read_trace, request_of, write_trace
from kvbm_core.sizing.load import Load


def mooncake(at_ms: int, tokens: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 3, "hash_ids": ids}


def bailian(at_s: float, tokens: int, ids: list[int], chat: int = 1) -> dict[str, Any]:
    more = {"chat_id": chat, "parent_chat_id": -1, "type": "text", "turn": 1}
    return {**more, "timestamp": at_s, "input_length": tokens, "output_length": 9, "hash_ids": ids}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_mooncakes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", mooncake(0, 1500, [7, 8, 9]), "\n", mooncake(2500, 1024, [7, 8]))
    trace = read_trace(path)
    assert (trace.block_tokens, trace.name, trace.seconds, trace.prompt_tokens) == (512, "t.jsonl", 2.5, 2524)
    first, second = trace.requests
    assert (list(first.ids), first.prompt_blocks, first.reusable_blocks) == ([0, 1], 2, 2)
    assert (list(second.ids), second.prompt_blocks, second.reusable_blocks) == ([0, 1], 2, 1)
    assert trace.distinct_blocks == 2


def test_bailians_ids_mean_blocks_and_not_prefixes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", bailian(0.5, 40, [5, 6, 1]), bailian(61.25, 33, [6, 5, 2]))
    trace = read_trace(path)
    assert (trace.block_tokens, trace.seconds) == (16, 60.75)
    assert [list(request.ids) for request in trace.requests] == [[0, 1], [2, 3]]
    assert reusable_tokens(trace) == 0


def test_a_generated_load_comes_back_from_its_file(tmp_path: Path) -> None:
    trace = Load(users=3, seconds=120, system_tokens=256).trace()
    write_trace(tmp_path / "t.jsonl", trace)
    again = read_trace(tmp_path / "t.jsonl")
    assert again.block_tokens == trace.block_tokens
    for ours, theirs in zip(trace.requests, again.requests, strict=True):
        assert theirs.at_s == pytest.approx(ours.at_s, abs=0.001)
        assert theirs.prompt_tokens == ours.prompt_tokens and len(theirs.ids) == len(ours.ids)
    assert reusable_tokens(again) == reusable_tokens(trace)


def test_a_folder_is_one_trace_in_the_order_of_time(tmp_path: Path) -> None:
    header = {"kvbm_trace": 1, "block_tokens": 4}
    write(tmp_path / "000001.jsonl", header, mooncake(30, 4, [1]), mooncake(10, 8, [1, 2]))
    write(tmp_path / "000000.jsonl", header, mooncake(20, 4, [1]))
    trace = read_trace(tmp_path)
    assert [round(1000 * request.at_s) for request in trace.requests] == [10, 20, 30]
    assert trace.distinct_blocks == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{\n", "line 2: "),
        ('{"timestamp": 1}\n', "line 2: .*input_length"),
        (b"\xff\xfe".decode("latin-1") + "\n", "line 2: "),
        (mooncake(1, -1, []), "line 2: .*input_length"),
        (mooncake(1, 513, [1]), None),  # the id of the last, half-full block may be missing
        (mooncake(1, 1025, [1]), "line 2: 1 ids for 1025 tokens in blocks of 512"),
        ({**mooncake(1, 1, [1]), "hash_ids": "no"}, r"line 2: .*hash_ids"),
        ({**mooncake(1, 1, [1]), "timestamp": -1}, r"line 2: .*timestamp"),
        ({**mooncake(1, 1, [1]), "timestamp": 1e300}, r"line 2: .*timestamp"),
        ({**mooncake(1, 1, [1]), "timestamp": 10**400}, r"line 2: .*timestamp"),
        (mooncake(0, 1, [1]), "line 2: its time is before that of the line above"),
    ],
)
def test_what_is_no_trace_is_told_with_file_and_line(line: object, said: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", mooncake(1, 600, [1, 2]), line)
    if said is None:
        assert len(read_trace(path).requests) == 2
        return
    with pytest.raises(TraceError, match=f"^{path}: {said}") as error:
        read_trace(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"kvbm_trace": 2, "block_tokens": 4}], "line 1: this kvbm reads version 1"),
        ([{"kvbm_trace": 1, "block_tokens": 0}], "line 1: .*block_tokens"),
        (
            [{"kvbm_trace": 1, "block_tokens": 4}, mooncake(0, 4, [1, 2, 3])],
            "line 2: 3 ids for 1 full blocks",
        ),
        ([{"kvbm_trace": 1, "block_tokens": 10**30}], "line 1: .*block_tokens"),
        ([{"kvbm_trace": 1, "block_tokens": 4}, mooncake(10**400, 4, [1])], "line 2: .*timestamp"),
        ([{"kvbm_trace": 1, "block_tokens": 4}, mooncake(0, 10**30, [1])], "line 2: .*input_length"),
        ([], "no request in it"),
    ],
)
def test_what_is_no_recording(lines: list[object], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(TraceError, match=f"^{path}: {said}"):
        read_trace(path)


def test_folders_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"there is no file \*.jsonl in it$"):
        read_trace(tmp_path)
    (tmp_path / "started").mkdir()
    write(tmp_path / "started" / "0.jsonl", mooncake(0, 1, [1]))
    with pytest.raises(TraceError, match=r"in it; name one of its folders, such as .*/started$"):
        read_trace(tmp_path)
    write(tmp_path / "a.jsonl", {"kvbm_trace": 1, "block_tokens": 4}, mooncake(0, 4, [1]))
    write(tmp_path / "b.jsonl", {"kvbm_trace": 1, "block_tokens": 8}, mooncake(0, 8, [1]))
    with pytest.raises(TraceError, match=r"b.jsonl: blocks of 8 tokens, in other files of 4"):
        read_trace(tmp_path)


def test_coarser_blocks_keep_prefixes(rng: random.Random) -> None:
    ids = list(range(10))
    trace = Trace("t", 4, [request_of(0, 38, ids[:9], 4), request_of(1, 41, ids, 4)])
    coarse = trace.coarser(4)
    assert coarse.block_tokens == 16 and trace.coarser(1) is trace
    assert [list(request.ids) for request in coarse.requests] == [[3, 7], [3, 7]]
    assert [request.prompt_blocks for request in coarse.requests] == [2, 2]
    assert reusable_tokens(trace) - reusable_tokens(coarse) < 16

"""Recordings of requests: what is written, what never is, and how much."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.clock import ManualClock, SystemClock
from kvbm_core.config import KvbmSettings
from kvbm_core.replay.machine import reusable_tokens
from kvbm_core.replay.trace import TraceError, read_trace
from kvbm_core.runtime import recorder as module
from kvbm_core.runtime.assembly import recorder_of
from kvbm_core.runtime.leader import LeaderParts
from kvbm_core.runtime.recorder import Recorder
from kvbm_core.testing import leader_bench
from kvbm_core.testing.leader_bench import BLOCK_TOKENS, ONE_GROUP, LeaderBench


def lines_of(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.rglob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def hashes(*names: str) -> list[bytes]:
    return [name.encode().ljust(32) for name in names]


def test_requests_become_lines_with_times_lengths_and_numbers(tmp_path: Path) -> None:
    clock = ManualClock(100.0)
    recorder = Recorder(tmp_path, 4, 10**6, clock)
    recorder.ended(102.5, 9, hashes("a", "b", "c"))
    recorder.ended(101.0, 4, hashes("a"))
    recorder.close()
    recorder.close()
    header, first, second = lines_of(tmp_path)
    assert header == {"kvbm_trace": 1, "block_tokens": 4}
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (2500, 9, 3)
    assert (second["timestamp"], second["input_length"], second["output_length"]) == (1000, 4, 0)
    assert len(set(first["hash_ids"])) == 3 and second["hash_ids"] == first["hash_ids"][:1]
    (path,) = tmp_path.rglob("*.jsonl")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    trace = read_trace(path.parent)
    assert [request.prompt_tokens for request in trace.requests] == [4, 9]


def test_numbers_tell_nothing_without_the_key(tmp_path: Path) -> None:
    for name in ("one", "two"):
        recorder = Recorder(tmp_path / name, 4, 10**6, ManualClock())
        recorder.ended(0.0, 4, hashes("a"))
        recorder.close()
    (_, one), (_, two) = lines_of(tmp_path / "one"), lines_of(tmp_path / "two")
    assert one["hash_ids"] != two["hash_ids"]


def test_two_that_begin_in_the_same_second_of_the_same_process_do_not_meet(tmp_path: Path) -> None:
    recorders = [Recorder(tmp_path, 4, 10**6, ManualClock()) for _ in range(2)]
    for recorder in recorders:
        recorder.ended(0.0, 4, hashes("a"))
    for recorder in recorders:
        recorder.close()
    assert [len(read_trace(folder).requests) for folder in tmp_path.iterdir()] == [1, 1]


def test_what_was_cut_off_at_the_end_is_left_out_and_the_rest_can_be_replayed(tmp_path: Path) -> None:
    """As by an engine that was killed, or a disk that became full."""
    recorder = Recorder(tmp_path, 4, 10**6, ManualClock())
    for prompt_tokens in (4, 8):
        recorder.ended(0.0, prompt_tokens, hashes("a"))
    recorder.close()
    (path,) = tmp_path.rglob("*.jsonl")
    whole = path.read_bytes()
    for cut in range(1, 30):
        path.write_bytes(whole[:-cut])
        requests = read_trace(path).requests
        assert [request.prompt_tokens for request in requests] == ([4, 8] if cut == 1 else [4])
    path.write_bytes(whole[:-30] + b"\n")
    with pytest.raises(TraceError, match="line 3"):
        read_trace(path)


def test_the_oldest_file_goes(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 4, 8 * 400, ManualClock())
    for number in range(100):
        recorder.ended(float(number), 400, hashes(*(f"{number} {block}" for block in range(10))))
    recorder.close()
    paths = sorted(tmp_path.rglob("*.jsonl"))
    assert len(paths) == module.NUM_FILES and paths[0].name != "000000.jsonl"
    assert sum(path.stat().st_size for path in paths) <= 8 * 400
    (folder,) = {path.parent for path in paths}
    assert read_trace(folder).requests[-1].at_s == 99.0


def test_what_comes_too_fast_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BLOCKS", 1)
    monkeypatch.setattr(module, "FLUSH_S", 3600.0)  # the last flush is the only one
    recorder = Recorder(tmp_path, 4, 10**6, ManualClock())
    for _ in range(5):
        recorder.ended(0.0, 4, hashes("a"))
    with caplog.at_level(logging.WARNING, "kvbm"):
        recorder.close()
    assert len(lines_of(tmp_path)) == 1 + 2
    assert "3 requests came too fast to be recorded" in caplog.text


def test_a_disk_that_cannot_be_written_ends_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, 4, 10**6, ManualClock())
    (folder,) = tmp_path.iterdir()
    (folder / "000000.jsonl").write_text("in the way")
    with caplog.at_level(logging.ERROR, "kvbm"):
        recorder.ended(0.0, 4, hashes("a"))
        recorder.close()
    assert "requests are not recorded any more" in caplog.text
    recorder.ended(0.0, 4, hashes("a"))
    assert not recorder._waiting, "what nobody writes is not kept"


def test_what_a_leader_serves_can_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    recorder = Recorder(tmp_path, BLOCK_TOKENS, 10**6, clock)
    monkeypatch.setattr(
        leader_bench, "LeaderParts", lambda *args, **more: LeaderParts(*args, **more, recorder=recorder)
    )
    bench = LeaderBench(16)
    prompt, answer = list(range(10)), [90, 91, 92]
    for number, tokens in enumerate(([*prompt, *answer], [*prompt, *answer, 7, 8, 9, 10, 11])):
        bench.clock.advance(2.0)
        state = bench.open(f"r{number}")
        asked = tokens[: len(prompt)] if not number else tokens
        bench.match(state, asked)
        bench.leader.decline(state)
        bench.answer(bench.offload(state, tokens))
        bench.leader.finish(state)
    bench.assert_idle()
    recorder.close()
    (folder,) = tmp_path.iterdir()
    trace = read_trace(folder)
    assert [request.prompt_tokens for request in trace.requests] == [10, 18]
    assert [len(request.ids) for request in trace.requests] == [3, 4]
    assert trace.seconds == 2.0 and trace.block_tokens == BLOCK_TOKENS
    assert reusable_tokens(trace) == 3 * BLOCK_TOKENS  # with the block that the answer has filled


@pytest.mark.shows("KVBM_RECORD_GB")
def test_so_many_gigabytes_are_kept(tmp_path: Path) -> None:
    settings = {"enable_record": True, "record_dir": str(tmp_path), "record_gb": 8 * 400 / 1e9}
    recorder = recorder_of(KvbmSettings.from_env(settings), ONE_GROUP, ManualClock())
    assert recorder is not None
    for number in range(100):
        recorder.ended(float(number), 400, hashes(*(f"{number} {block}" for block in range(10))))
    recorder.close()
    assert 0 < sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl")) <= 8 * 400


@pytest.mark.shows("DYN_KVBM_ENABLE_RECORD", "KVBM_RECORD_DIR")
def test_the_settings_decide(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert recorder_of(KvbmSettings.from_env({}), ONE_GROUP, SystemClock()) is None
    settings = {"enable_record": True, "record_dir": str(tmp_path / "r"), "record_gb": 0.001}
    recorder = recorder_of(KvbmSettings.from_env(settings), ONE_GROUP, SystemClock())
    assert recorder is not None
    recorder.close()
    assert (tmp_path / "r").is_dir()
    (tmp_path / "file").touch()
    settings["record_dir"] = str(tmp_path / "file")
    caplog.clear()
    with caplog.at_level(logging.ERROR, "kvbm"):
        assert recorder_of(KvbmSettings.from_env(settings), ONE_GROUP, SystemClock()) is None
    (line,) = caplog.messages
    assert line.startswith(f"kvbm: KVBM_RECORD_DIR={tmp_path / 'file'}: requests are not recorded: ")


def test_two_leaders_of_one_process_have_a_folder_each(tmp_path: Path) -> None:
    recorders = [Recorder(tmp_path, 4, 100_000, SystemClock()) for _ in range(3)]
    for recorder in recorders:
        recorder.ended(0.0, 4, [b"x" * 16])
        recorder.close()
    assert len(list(tmp_path.iterdir())) == len(list(tmp_path.glob("*/000000.jsonl"))) == 3

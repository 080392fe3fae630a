"""How far apart states should be kept: what the replay counts, and its table."""

from __future__ import annotations

from benchmarks.plan.states import DISTANCES, LOADS, MODELS, Case, Row, StatesReplay, apps, chats, table
from kvbm_core.replay.trace import request_of


def test_a_second_turn_finds_the_newest_state_and_a_long_beginning_one_inside() -> None:
    model = MODELS[0]
    machine = StatesReplay(model, 100, every_tokens=2 * model.block_tokens, step_tokens=2048)
    machine.serve(request_of(0.0, 6 * 1024 + 1, tuple(range(9)), 1024))
    assert machine.found_tokens == 0
    machine.serve(request_of(1.0, 10 * 1024, tuple(range(10)), 1024))  # the next turn: prompt and answer
    assert machine.found_tokens == 9 * 1024
    machine.serve(request_of(2.0, 9 * 1024, (0, 1, 2, *range(50, 56)), 1024))  # another text behind three
    assert machine.found_tokens == (9 + 2) * 1024
    assert 0 < machine.state_share() < 1


def test_loads_are_the_same_each_time_and_their_blocks_fit_the_models() -> None:
    assert len(LOADS) == 4
    assert apps(num_requests=20).requests == apps(num_requests=20).requests
    assert chats(seconds=20).requests == chats(seconds=20).requests
    for model in MODELS:
        assert model.block_tokens % chats(seconds=20).block_tokens == 0
        assert 2000 < model.state_tokens < 9500


def test_the_table_has_a_line_for_each_memory_and_marks_the_best() -> None:
    rows = [
        Row(Case(0, MODELS[0], 2048, share, every), "chats", 0.1 + (every == 4096) * 0.2, 0.5)
        for share in (0.1, 0.4)
        for every in DISTANCES
    ]
    lines = table(rows)
    assert len(lines) == 4 and all(line.count("|") == len(DISTANCES) + 5 for line in lines)
    assert lines[2].count("**30.0%**") == 1 and lines[2].count("10.0%") == len(DISTANCES) - 1

"""Notes of the configurations that were served here: what a later start makes of them, and what they hold."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvbm_core.identity.environment import describe_environment
from kvbm_core.identity.fields import Description, canonical
from kvbm_core.runtime import namesakes
from kvbm_core.runtime.namesakes import (
    MAX_BEGINNINGS,
    MAX_NOTES,
    Namesakes,
    beginning_of,
    differing_fields,
    short_fields,
)

TOKENS = list(range(100, 140))


def description(**fields: object) -> Description:
    return Description(tuple(sorted((name, canonical(value)) for name, value in fields.items())), (), ())


def serve(
    folder: Path, *begins: list[int], tokens: int = 16, model: str = "a model", **fields: object
) -> None:
    """One life of an engine with these fields."""
    known = Namesakes(folder, "an engine", model, tokens, description(**fields))
    for each in begins:
        known.began(beginning_of(each, tokens))
    known.close()


def asked(folder: Path, tokens: int = 16, model: str = "a model", **fields: object) -> str:
    known = Namesakes(folder, "an engine", model, tokens, description(**fields))
    try:
        return known.elsewhere(TOKENS)
    finally:
        known.close()


def test_the_field_that_differs_is_told(tmp_path: Path) -> None:
    serve(tmp_path, TOKENS, dtype="bfloat16", heads=8)
    assert asked(tmp_path, dtype="float16", heads=8) == "dtype: bfloat16 there, float16 here"
    assert asked(tmp_path, dtype="bfloat16", heads=8) == ""  # itself
    assert asked(tmp_path, dtype="bfloat16") == "heads: 8 there, not set here"


def test_only_what_began_so_is_known_there(tmp_path: Path) -> None:
    serve(tmp_path, [*TOKENS[:15], 7], dtype="bfloat16")
    assert asked(tmp_path, dtype="float16") == ""
    serve(tmp_path, TOKENS[:16], dtype="bfloat16")  # the same folder: what it knew before stays
    assert asked(tmp_path, dtype="float16") != ""
    known = Namesakes(tmp_path, "an engine", "a model", 16, description(dtype="float16"))
    assert known.elsewhere([*TOKENS[:15], 7]) and not known.elsewhere(TOKENS[:15])
    known.close()


def test_other_models_and_engines_are_no_namesakes(tmp_path: Path) -> None:
    serve(tmp_path, TOKENS, model="another", dtype="bfloat16")
    assert asked(tmp_path, dtype="float16") == ""


def test_another_block_size_is_told_too(tmp_path: Path) -> None:
    serve(tmp_path, TOKENS, tokens=32, dtype="bfloat16")
    assert asked(tmp_path, tokens=16, dtype="bfloat16") == "block_size_tokens: 32 there, 16 here"


def test_of_several_the_nearest_is_told_and_not_more_than_three_fields(tmp_path: Path) -> None:
    serve(tmp_path, TOKENS, **{f"field{number}": 1 for number in range(5)})
    text = asked(tmp_path, **{f"field{number}": 2 for number in range(5)})
    assert text.count("1 there, 2 here") == 3 and text.endswith("; and 2 more")
    serve(tmp_path, TOKENS, **{f"field{number}": 2 for number in range(4)}, field4=3)
    text = asked(tmp_path, **{f"field{number}": 2 for number in range(5)})
    assert text == "field4: 3 there, 2 here"


def test_values_that_are_long_or_may_be_secret_are_digests(tmp_path: Path) -> None:
    secret = "hunter2"
    of_environment = describe_environment({"VLLM_PASSWORD": secret}, re.compile("VLLM_.*"), {}, {})
    long = description(config={"key": "x" * 200})
    told = short_fields(Description.joined([of_environment, long]), 16)
    assert told["VLLM_PASSWORD"].startswith("#") and told["config"].startswith("#")
    serve(tmp_path, TOKENS, config={"key": "x" * 200})
    (note,) = tmp_path.iterdir()
    assert "xxx" not in note.read_text()
    assert asked(tmp_path, config={"key": "y" * 200}) == "config: another value there"


def test_notes_are_private_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kvbm" / "notes"
    monkeypatch.setattr(namesakes, "MAX_NOTES", 3)
    for number in range(5):
        serve(folder, *([number, *TOKENS] for number in range(20)), number=number)
    assert len(list(folder.iterdir())) == 3 < MAX_NOTES
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_newest_beginnings_stay(tmp_path: Path) -> None:
    serve(tmp_path, TOKENS, dtype="bfloat16")
    serve(tmp_path, *([number] * 16 for number in range(MAX_BEGINNINGS)), dtype="bfloat16")
    assert asked(tmp_path, dtype="float16") == ""
    serve(tmp_path, TOKENS, dtype="bfloat16")
    assert asked(tmp_path, dtype="float16") != ""


def test_what_cannot_be_read_or_written_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    serve(tmp_path, TOKENS, dtype="bfloat16")
    (note,) = tmp_path.iterdir()
    whole = note.read_bytes()
    for damaged in (b"", whole[:-5], b"[]", b"\xff" * 100, whole.replace(b'"format":1', b'"format":2')):
        note.write_bytes(damaged)
        assert asked(tmp_path, dtype="float16") == ""
    note.unlink()
    note.mkdir()
    assert asked(tmp_path, dtype="float16") == ""
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    serve(in_the_way / "folder", TOKENS, dtype="bfloat16")
    assert in_the_way.read_text() == ""


def test_what_means_nothing_elsewhere_leaves_no_note(tmp_path: Path) -> None:
    unknown = description(dtype="bfloat16")._replace(unknown=("a field",))
    known = Namesakes(tmp_path, "an engine", "a model", 16, unknown)
    known.began(beginning_of(TOKENS, 16))
    known.close()
    assert not list(tmp_path.iterdir())


def test_a_beginning_has_the_same_name_in_another_process() -> None:
    line = f"from kvbm_core.runtime.namesakes import beginning_of; print(beginning_of({TOKENS}, 16))"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert int(done.stdout) == beginning_of(TOKENS, 16)


def test_equal_fields_do_not_differ() -> None:
    assert differing_fields({"a": "1"}, {"a": "1"}) == []
    assert differing_fields({"a": "1"}, {"b": "1"}) == ["a", "b"]

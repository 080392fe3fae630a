"""NVTX ranges, recorded by a library that NVTX loads as it loads a profiler's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvbm_core.observe.guard import seams_of
from kvbm_core.observe.ranges import ranged

# What NVTX (version 3) gives a profiler: tables of its callbacks, to be filled. Of events only what is read.
RECORDER = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*function)(void);
struct callbacks { size_t size; int (*table)(int module, function ***out, unsigned *out_size); };
struct event {
  uint16_t version, size; uint32_t category; int32_t color_type; uint32_t color;
  int32_t payload_type, reserved; uint64_t payload; int32_t message_type; const char *message;
};
enum { CALLBACKS = 1, CORE2 = 5, PUSH = 4, POP = 5, NAME_CATEGORY = 8, REGISTER_STRING = 10, CREATE = 12 };
static char *categories[256];

static void say(const char *what, const char *domain, const char *message, const char *category) {
  FILE *file = fopen(getenv("RECORD_TO"), "a");
  fprintf(file, "%s %s %s %s\n", what, domain, message, category);
  fclose(file);
}
static void *create(const char *name) { return strdup(name); }
static void *register_string(void *domain, const char *text) { return strdup(text); }
static void name_category(void *domain, uint32_t number, const char *name) {
  categories[number & 255] = strdup(name);
}
static int push(void *domain, const struct event *event) {
  const char *category = categories[event->category & 255];
  say("push", domain, event->message, category ? category : "-");
  return 0;
}
static int pop(void *domain) { say("pop", domain, "-", "-"); return 0; }

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
  const struct callbacks *callbacks = export_table(CALLBACKS);
  function **table; unsigned size;
  if (!callbacks || !callbacks->table(CORE2, &table, &size)) return 0;
  *table[CREATE] = (function)create;
  *table[REGISTER_STRING] = (function)register_string;
  *table[NAME_CATEGORY] = (function)name_category;
  *table[PUSH] = (function)push;
  *table[POP] = (function)pop;
  return 1;
}
"""
PROFILED = """
from kvbm_core.observe.guard import GuardState, guarded, seams_of

class SchedulerSide:
    guard_state = GuardState()

    @guarded("get_num_new_matched_tokens", lambda self: 0)
    def get_num_new_matched_tokens(self):
        return 5

class WorkerSide:
    guard_state = GuardState()

    @guarded("start_load_kv", lambda self: "safe")
    def start_load_kv(self):
        raise ValueError("injected")

assert SchedulerSide().get_num_new_matched_tokens() == 5
assert WorkerSide().start_load_kv() == "safe"
assert seams_of(SchedulerSide, WorkerSide) == ("get_num_new_matched_tokens", "start_load_kv")
"""


def run(tmp_path: Path, **environment: str) -> None:
    """A process whose engine calls two methods of ours."""
    command = [sys.executable, "-c", PROFILED]
    subprocess.run(command, env={**os.environ, **environment}, check=True, timeout=120, cwd=tmp_path)


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """The library."""
    pytest.importorskip("nvtx", reason="NOT RUN: needs the package nvtx")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("NOT RUN: needs a C compiler")
    source, library = tmp_path / "recorder.c", tmp_path / "recorder.so"
    source.write_text(RECORDER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=120)
    return library


def test_a_profiler_sees_what_the_engine_calls(recorder: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    run(tmp_path, NVTX_INJECTION64_PATH=str(recorder), RECORD_TO=str(record))
    assert record.read_text().splitlines() == [
        "push kvbm get_num_new_matched_tokens scheduler",
        "pop kvbm - -",
        "push kvbm start_load_kv worker",
        "pop kvbm - -",
    ]


def test_without_a_profiler_nothing_is_recorded(recorder: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    run(tmp_path, RECORD_TO=str(record))
    assert not record.exists()


def test_without_a_profiler_a_function_is_left_as_it_is() -> None:
    def hook() -> int:
        return 1

    assert ranged(hook) is hook
    assert seams_of(type("Engine", (), {"hook": hook})) == ()

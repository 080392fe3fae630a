"""TensorRT-LLM's arguments: what is refused, in which words; where leader and workers meet; the KV cache's
dtype.
"""

from __future__ import annotations

import os
import tempfile
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm_core.errors import ConfigError, UnsupportedError
from kvbm_core.runtime.endpoint import SECRET_BYTES
from kvbm_trtllm import config
from kvbm_trtllm.meeting import Meeting


class QuantAlgo(str, Enum):
    """As TensorRT-LLM's: printing a member shows its name, its value is what counts."""

    FP8 = "FP8"
    NVFP4 = "NVFP4"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("DYN_KVBM_", "KVBM_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))


def llm_args(*, cache: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Arguments as a user's who has chosen nothing, with changes."""
    values: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "max_beam_width": 1,
        "enable_attention_dp": False,
        "quant_config": None,
    }
    of_cache: dict[str, Any] = {
        "tokens_per_block": 32,
        "dtype": "auto",
        "enable_block_reuse": True,
        "enable_partial_reuse": True,
        "host_cache_size": None,
    }
    return SimpleNamespace(
        **{**values, **changes}, kv_cache_config=SimpleNamespace(**{**of_cache, **(cache or {})})
    )


def quantized(kv_cache: Any) -> Any:
    """The quantization that a checkpoint brings along."""
    return SimpleNamespace(quant_algo=None, kv_cache_quant_algo=kv_cache)


SUPPORTED: dict[str, Any] = {
    "nothing chosen": llm_args(),
    "tensor parallel": llm_args(tensor_parallel_size=8),
    "attention DP": llm_args(tensor_parallel_size=8, enable_attention_dp=True),
    "FP8": llm_args(cache={"dtype": "fp8"}),
    "FP8 of the checkpoint": llm_args(quant_config=quantized(QuantAlgo.FP8)),
    "partial reuse off": llm_args(cache={"enable_partial_reuse": False}),
    "a host cache of no bytes": llm_args(cache={"host_cache_size": 0}),
    "None where a number may stand": llm_args(
        pipeline_parallel_size=None,
        context_parallel_size=None,
        max_beam_width=None,
        tensor_parallel_size=None,
    ),
    "fields that an older version lacks": SimpleNamespace(kv_cache_config=SimpleNamespace()),
}
REFUSED: dict[str, tuple[Any, str, str]] = {
    "pipeline": (
        llm_args(pipeline_parallel_size=2),
        "pipeline_parallel_size=2",
        "remove it, or kv_connector_config",
    ),
    "context": (
        llm_args(context_parallel_size=4),
        "context_parallel_size=4",
        "remove it, or kv_connector_config",
    ),
    "beams": (llm_args(max_beam_width=3), "max_beam_width=3", "remove it, or kv_connector_config"),
    "host cache": (
        llm_args(cache={"host_cache_size": 1 << 30}),
        "kv_cache_config.host_cache_size=1073741824",
        "remove it, or kv_connector_config",
    ),
    "no block reuse": (
        llm_args(cache={"enable_block_reuse": False}),
        "kv_cache_config.enable_block_reuse=false",
        "remove it, or kv_connector_config",
    ),
    "NVFP4": (llm_args(cache={"dtype": "nvfp4"}), "NVFP4 KV cache", "use kv_cache_config.dtype=fp8"),
    "NVFP4 of the checkpoint": (
        llm_args(quant_config=quantized(QuantAlgo.NVFP4)),
        "NVFP4 KV cache",
        "use kv_cache_config.dtype=fp8",
    ),
}


@pytest.mark.parametrize("case", SUPPORTED)
def test_what_is_supported_passes(case: str) -> None:
    config.check_supported(SUPPORTED[case], has_attention_dp=True)


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_one_line_with_setting_value_and_remedy(case: str) -> None:
    args, setting, remedy = REFUSED[case]
    with pytest.raises(UnsupportedError) as caught:
        config.check_supported(args, has_attention_dp=True)
    line = str(caught.value)
    assert line.startswith("kvbm: ") and len(line.splitlines()) == 1 and len(line) < 300
    assert setting in line and remedy in line


def test_fp8_asked_for_wins_over_the_checkpoints_nvfp4() -> None:
    config.check_supported(
        llm_args(cache={"dtype": "fp8"}, quant_config=quantized(QuantAlgo.NVFP4)), has_attention_dp=True
    )


@pytest.mark.parametrize(
    ("configured", "quant_config", "dtype"),
    [
        ("fp8", None, "fp8"),
        ("fp8", quantized(QuantAlgo.NVFP4), "fp8"),
        ("auto", quantized(QuantAlgo.FP8), "FP8"),
        ("auto", quantized("FP8"), "FP8"),
        ("auto", quantized(None), "auto"),
        ("auto", None, "auto"),
        (None, None, "auto"),
    ],
)
def test_the_dtype_is_the_configured_one_or_the_checkpoints(
    configured: Any, quant_config: Any, dtype: str
) -> None:
    assert config.kv_dtype_of(llm_args(cache={"dtype": configured}, quant_config=quant_config)) == dtype


def test_ranks_that_hold_shards_of_a_block() -> None:
    assert config.world_size_of(llm_args(tensor_parallel_size=4)) == 4
    assert config.world_size_of(llm_args(tensor_parallel_size=4, enable_attention_dp=True)) == 1
    assert config.world_size_of(llm_args(tensor_parallel_size=None)) == 1
    assert config.block_tokens_of(llm_args(cache={"tokens_per_block": 64})) == 64
    assert config.block_tokens_of(SimpleNamespace(kv_cache_config=SimpleNamespace())) == 32


# ---------------------------------------------------------------- where they meet


def test_without_ports_engines_meet_on_sockets_of_their_own() -> None:
    settings = config.read_settings()
    first, second = config.endpoint_of("one", settings, 0), config.endpoint_of("two", settings, 0)
    assert first.address.startswith("ipc://") and first != second
    assert config.endpoint_of("one", settings, 0) == first
    assert config.endpoint_of("one", settings, 3) == first, "the engine's own name keeps ranks apart"


@pytest.mark.shows("DYN_KVBM_LEADER_ZMQ_HOST", "DYN_KVBM_LEADER_ZMQ_ACK_PORT")
@pytest.mark.parametrize(
    ("name", "value", "address"),
    [
        ("DYN_KVBM_LEADER_ZMQ_ACK_PORT", "6000", "tcp://127.0.0.1:6000"),
        ("DYN_KVBM_LEADER_ZMQ_HOST", "localhost", "tcp://127.0.0.1:56002"),
    ],
)
def test_a_port_or_a_host_switches_to_tcp(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, address: str
) -> None:
    monkeypatch.setenv(name, value)
    endpoint = config.endpoint_of("one", config.read_settings(), 0)
    assert (endpoint.address, endpoint.path) == (address, None)


@pytest.mark.shows("DYN_KVBM_LEADER_ZMQ_PUB_PORT")
def test_the_port_that_is_never_bound_switches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_LEADER_ZMQ_PUB_PORT", "6001")
    settings = config.read_settings()
    assert config.endpoint_of("one", settings, 0).address.startswith("ipc://")
    assert not settings.warnings_under("TensorRT-LLM")


def test_every_engine_has_a_secret_that_its_ranks_are_told_and_no_log_tells() -> None:
    settings, meetings = config.read_settings(), [Meeting(0), Meeting(0)]
    endpoints = [config.endpoint_of(meeting.engine_id, settings, 0) for meeting in meetings]
    assert endpoints[0].secret != endpoints[1].secret
    for meeting, endpoint in zip(meetings, endpoints, strict=True):
        told = str(endpoint), repr(endpoint), meeting.engine_id[-8:]  # what is logged
        token = meeting.engine_id.rpartition(" ")[2]
        assert len(bytes.fromhex(token)) == SECRET_BYTES and token in endpoint.secret.decode()
        assert not any(token[:-8] in each for each in told)


def test_under_attention_dp_engines_take_neighbouring_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_LEADER_ZMQ_ACK_PORT", "6000")
    settings = config.read_settings()
    addresses = [config.endpoint_of("one", settings, rank).address for rank in range(3)]
    assert addresses == [f"tcp://127.0.0.1:{port}" for port in (6000, 6001, 6002)]


def test_a_routable_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_LEADER_ZMQ_HOST", "10.0.0.1")
    with pytest.raises(ConfigError, match="loopback"):
        config.endpoint_of("one", config.read_settings(), 0)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_SYNC_ONBOARD_BYTES", "1000000")
    monkeypatch.setenv("DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY", "40")
    settings = config.read_settings()
    assert (settings.sync_onboard_bytes, settings.host_offload_prefix_min_priority) == (1_000_000, 40)
    assert not settings.warnings, "both have an effect"


def test_loads_of_many_blocks_may_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_SYNC_ONBOARD_BYTES", str(256 << 20))
    assert config.read_settings().sync_onboard_bytes == 256 << 20


def test_attention_dp_needs_a_leader_on_each_rank() -> None:
    with pytest.raises(UnsupportedError, match=r"enable_attention_dp=true: .* use a newer one"):
        config.check_supported(llm_args(enable_attention_dp=True), has_attention_dp=False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tensor_parallel_size": 8}, 1.0),
        ({"tensor_parallel_size": 16, "gpus_per_node": 8}, 0.5),
        ({"tensor_parallel_size": 8, "gpus_per_node": 8, "enable_attention_dp": True}, 8.0),
        ({"tensor_parallel_size": 16, "gpus_per_node": 8, "enable_attention_dp": True}, 8.0),
        ({}, 1.0),
    ],
)
def test_the_memory_of_all_ranks_here_is_in_the_size_of_one_leaders(
    fields: dict[str, Any], expected: float
) -> None:
    assert config.tiers_here_of(SimpleNamespace(**fields)) == expected

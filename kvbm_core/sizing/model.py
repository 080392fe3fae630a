"""What a token's KV takes, and what computing it costs: from a model's config.json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbm_core.identity.hub import folder_of
from kvbm_core.identity.layers import STATES, WINDOWED, WITHOUT_KV, layer_kinds, state_bytes, text_part

Floats = npt.NDArray[np.float64]
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "auto": 2}
_FP8_BYTES = 1
_INDEXER_SCALE_BYTES = 4
"""Of a sparse attention's index: one byte for each of index_head_dim, and a scale."""


class SizingError(ValueError):
    """What was given cannot be sized: one line with what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """Bytes of one token's KV over all ranks. ``stored_bytes``: below the device, where windowed layers are
    kept whole; ``device_bytes``: on the device, which keeps of windowed layers the window alone.
    """

    stored_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class Model:
    """What a config says. ``kinds``: of each layer. ``state_bytes``: what all layers with states keep of one
    sequence, over all ranks; 0 if the config does not say it. ``weights_bytes``: of the files that lie beside
    it, or estimated. ``notes``: what a reader should know, one line each.
    """

    name: str
    kinds: tuple[str, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    latent_dim: int
    index_dim: int
    window_tokens: int
    dtype: str
    active_parameters: float
    weights_bytes: float
    max_tokens: int
    state_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def is_mla(self) -> bool:
        """Whether it keeps latents, the same ones on every rank."""
        return self.latent_dim > 0

    def kv(self, num_ranks: int, kv_dtype: str, *, is_stored_once: bool = False) -> KvShape:
        """With so many tensor-parallel ranks. ``is_stored_once``: DYN_KVBM_NCCL_MLA_MODE, for latents.

        SizingError if the heads cannot be split so.
        """
        size = element_bytes(kv_dtype, self.dtype)
        if self.is_mla:
            index = self.index_dim + _INDEXER_SCALE_BYTES if self.index_dim else 0
            layer, copies = self.latent_dim * size + index, num_ranks
        else:
            heads = max(self.kv_heads, num_ranks)
            if heads % num_ranks or heads % self.kv_heads:
                raise SizingError(f"--tp {num_ranks}: the {self.kv_heads} KV heads cannot be split so")
            layer, copies = heads * (self.head_dim + self.value_dim) * size, 1
        stored = sum(layer for kind in self.kinds if kind not in WITHOUT_KV)
        windowed = sum(layer for kind in self.kinds if kind in WINDOWED)
        kept = 1 if is_stored_once else copies
        return KvShape(stored * kept, (stored - windowed or stored) * copies)

    def check_predictable(self) -> None:
        """SizingError for a model with states: which of them are kept, and where hits end, is not
        predicted.
        """
        layers = sum(kind in STATES for kind in self.kinds)
        if not layers:
            return
        takes = ""
        token_bytes = self.kv(1, "auto").stored_bytes
        if self.state_bytes:
            takes = f" of a sequence they take {self.state_bytes / 1e6:,.0f} MB"
            takes += f", as much as {self.state_bytes // token_bytes:,} tokens of KV:" if token_bytes else ":"
        raise SizingError(
            f"--model {self.name}: {layers} of {len(self.kinds)} layers keep states, whose hits are not "
            f"predicted:{takes} give each conversation room for its KV and two such states"
        )

    def flops(self, tokens: Floats, attended: Floats) -> Floats:
        """To compute so many tokens, which look at ``attended`` pairs of tokens together."""
        num_layers = sum(kind not in WITHOUT_KV for kind in self.kinds)
        return 2 * self.active_parameters * tokens + 4 * self.heads * self.head_dim * num_layers * attended


def element_bytes(kv_dtype: str, model_dtype: str) -> int:
    """Of one number in the KV cache. SizingError for a dtype that is not known."""
    name = model_dtype if kv_dtype == "auto" else kv_dtype
    if name.startswith(("fp8", "float8", "int8")):
        return _FP8_BYTES
    if name not in _DTYPE_BYTES:
        raise SizingError(f"--kv-dtype {name}: write auto, fp8, bfloat16, float16 or float32")
    return _DTYPE_BYTES[name]


def read_model(name: str) -> Model:
    """Of a folder, a config.json, or a model of the hub that is in its cache here. SizingError if there is no
    config, or none of a model that is understood.
    """
    try:
        place = folder_of(name)
        if place is None:
            raise SizingError(
                f"--model {name}: neither a folder nor in the hub's cache here; give a folder with its "
                f"config.json, or fetch that: hf download {name} config.json (of the package huggingface_hub)"
            )
        path = place / "config.json" if place.is_dir() else place
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SizingError(f"--model {name}: its config.json cannot be read: {reason}") from None
    except json.JSONDecodeError as error:
        raise SizingError(f"--model {name}: its config.json is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise SizingError(f"--model {name}: its config.json is no object")
    try:
        return _Config(name, config).model(path.parent)
    except (KeyError, TypeError, ZeroDivisionError, AttributeError) as error:
        raise SizingError(
            f"--model {name}: its config.json is of no model that kvbm can size: {error}"
        ) from None


class _Config:
    """A config.json; of models with images and the like the part that is the language model."""

    def __init__(self, name: str, whole: Mapping[str, Any]) -> None:
        self._name = name
        self._whole = whole
        self._config = text_part(whole)

    def _get(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self._config.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return int(value)
        if default is None:
            raise KeyError(f"it has no {names[0]}")
        return default

    def model(self, folder: Path) -> Model:
        """See Model."""
        hidden, heads = (
            self._get("hidden_size", "n_embd", "d_model"),
            self._get("num_attention_heads", "n_head"),
        )
        kv_heads = 1 if self._config.get("multi_query") is True else heads
        kv_heads = self._get("num_key_value_heads", "num_kv_heads", default=kv_heads)
        head_dim = self._get("head_dim", default=hidden // heads)
        rank = self._get("kv_lora_rank", default=0)
        kinds = self._kinds()
        if min(hidden, heads, kv_heads, head_dim, len(kinds)) < 1:
            raise KeyError("a size in it is not positive")
        parameters, active = self._parameters(hidden, heads * head_dim, kv_heads * head_dim, len(kinds))
        dtype = str(
            self._config.get("dtype") or self._config.get("torch_dtype") or self._whole.get("torch_dtype")
        )
        dtype = dtype.removeprefix("torch.") if dtype != "None" else "bfloat16"
        is_known = dtype in _DTYPE_BYTES
        files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        estimate = parameters * self._weight_bytes(_DTYPE_BYTES.get(dtype, 2))
        return Model(
            name=self._name,
            kinds=kinds,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=head_dim if rank else self._get("v_head_dim", default=head_dim),
            latent_dim=rank + self._get("qk_rope_head_dim", default=0) if rank else 0,
            index_dim=self._get("index_head_dim", default=0) if rank else 0,
            window_tokens=self._get("sliding_window", "attention_chunk_size", default=0),
            dtype=dtype if is_known else "bfloat16",
            active_parameters=active,
            weights_bytes=float(files or estimate),
            max_tokens=self._get("max_position_embeddings", "n_positions", default=0),
            state_bytes=sum(kind in STATES for kind in kinds)
            * state_bytes(self._config, _DTYPE_BYTES.get(dtype, 2)),
            notes=tuple(self._notes(kinds, has_files=files > 0)),
        )

    def _notes(self, kinds: Sequence[str], *, has_files: bool) -> list[str]:
        notes = []
        if any(kind in WINDOWED for kind in kinds):
            notes.append(
                "layers with a window are kept whole below the device; hits load less than counted here"
            )
        if not has_files:
            notes.append("the weights' size is estimated from the config; --weights-gb says it better")
        return notes

    def _kinds(self) -> tuple[str, ...]:
        num_layers = self._get("num_hidden_layers", "n_layer", "num_layers")
        return layer_kinds(self._config, num_layers - self._get("num_kv_shared_layers", default=0))

    def _weight_bytes(self, dtype_bytes: int) -> float:
        """Of one parameter."""
        quantized = self._whole.get("quantization_config") or self._config.get("quantization_config")
        if not isinstance(quantized, dict):
            return dtype_bytes
        bits = quantized.get("bits") or quantized.get("weight_bits")
        if isinstance(bits, int):
            return bits / 8
        method = str(quantized.get("quant_method", ""))
        return 0.5 if "4" in method else 1.0

    def _parameters(self, hidden: int, query: int, kv: int, num_layers: int) -> tuple[float, float]:
        """All, and those that one token is multiplied with."""
        attention = 2.0 * hidden * query + 2.0 * hidden * kv
        dense = 3.0 * hidden * self._get("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        experts = self._get("num_experts", "n_routed_experts", "num_local_experts", default=0)
        embedding = float(self._get("vocab_size", default=0)) * hidden
        num_dense = num_layers
        all_mlp = active_mlp = 0.0
        if experts:
            num_dense = min(num_layers, self._get("first_k_dense_replace", default=0))
            one = 3.0 * hidden * self._get("moe_intermediate_size", "intermediate_size")
            shared = one * self._get("n_shared_experts", default=0)
            used = self._get("num_experts_per_tok", "num_experts_per_token", default=1)
            all_mlp = (num_layers - num_dense) * (experts * one + shared)
            active_mlp = (num_layers - num_dense) * (used * one + shared)
        common = num_layers * attention + num_dense * dense
        copies = 1 if self._config.get("tie_word_embeddings") else 2
        return common + all_mlp + copies * embedding, common + active_mlp

"""Every label value a metric may carry: closed lists, so that the number of time series is bounded."""

from __future__ import annotations

from enum import Enum

from kvbm_core.errors import Outcome
from kvbm_core.types import Direction


class _Label(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class DropReason(_Label):
    """Why a block that could have been offloaded was not kept."""

    NO_SPACE = "no_space"
    QUEUE_FULL = "queue_full"
    NOT_ADMITTED = "not_admitted"
    CANCELLED = "cancelled"
    ABORTED = "aborted"
    PREEMPTED = "preempted"
    TRANSFER_FAILED = "transfer_failed"
    TIER_NOT_READY = "tier_not_ready"
    RESET = "reset"
    OTHER = "other"


class FailureKind(_Label):
    """What failed outside our control and is no transfer; for those see FAILURE_KINDS."""

    HANDSHAKE = "handshake"
    LAYOUT = "layout"
    LEASE_EXPIRED = "lease_expired"
    WORKER_LOST = "worker_lost"
    CHANNEL = "channel"
    BAD_MESSAGE = "bad_message"
    EVENTS_DROPPED = "events_dropped"
    OTHER = "other"


FAILURE_KINDS: tuple[str, ...] = (
    *(kind.value for kind in FailureKind),
    *(
        f"{direction}_{outcome}"
        for direction in Direction
        for outcome in Outcome
        if outcome is not Outcome.OK
    ),
)
"""FailureKind, and every way in which a transfer can fail, such as ``onboard_corrupt``."""


class UncachedReason(_Label):
    """Why a request bypasses the cache."""

    MULTIMODAL = "multimodal"
    PROMPT_EMBEDS = "prompt_embeds"
    PROMPT_LOGPROBS = "prompt_logprobs"
    POOLING = "pooling"
    ADAPTER = "adapter"
    LAYOUT = "layout"
    BAD_TOKENS = "bad_tokens"
    NOT_READY = "not_ready"
    STREAMING_SESSION = "streaming_session"
    OPTED_OUT = "opted_out"
    LIMIT = "limit"
    OTHER = "other"


class Seam(_Label):
    """A place where the engine calls kvbm, or a kvbm thread that must not die; each has a guard."""

    GET_NUM_NEW_MATCHED_TOKENS = "get_num_new_matched_tokens"
    UPDATE_STATE_AFTER_ALLOC = "update_state_after_alloc"
    BUILD_CONNECTOR_META = "build_connector_meta"
    BUILD_CONNECTOR_WORKER_META = "build_connector_worker_meta"
    UPDATE_CONNECTOR_OUTPUT = "update_connector_output"
    REQUEST_FINISHED = "request_finished"
    REQUEST_FINISHED_ALL_GROUPS = "request_finished_all_groups"
    ON_NEW_REQUEST = "on_new_request"
    TAKE_EVENTS = "take_events"
    RESET_CACHE = "reset_cache"
    BIND_KV_CACHE_MANAGER = "bind_kv_cache_manager"
    HAS_PENDING_PUSH_WORK = "has_pending_push_work"
    HAS_PENDING_BLOCK_FREES = "has_pending_block_frees"
    GET_EXTERNAL_CACHE_HIT_SOURCES = "get_external_cache_hit_sources"
    GET_LOADED_KV_CACHE_GROUP_IDS = "get_loaded_kv_cache_group_ids"
    GET_TRANSFER_RESULTS = "get_transfer_results"
    GET_KV_CONNECTOR_STATS = "get_kv_connector_stats"
    GET_KV_CONNECTOR_KV_CACHE_EVENTS = "get_kv_connector_kv_cache_events"
    SET_XFER_HANDSHAKE_METADATA = "set_xfer_handshake_metadata"
    GET_HANDSHAKE_METADATA = "get_handshake_metadata"
    REGISTER_KV_CACHES = "register_kv_caches"
    REGISTER_CROSS_LAYERS_KV_CACHE = "register_cross_layers_kv_cache"
    UNREGISTER_KV_CACHES = "unregister_kv_caches"
    RESTORE_KV_CACHES = "restore_kv_caches"
    BIND_CONNECTOR_METADATA = "bind_connector_metadata"
    CLEAR_CONNECTOR_METADATA = "clear_connector_metadata"
    HANDLE_PREEMPTIONS = "handle_preemptions"
    START_LOAD_KV = "start_load_kv"
    WAIT_FOR_LAYER_LOAD = "wait_for_layer_load"
    SAVE_KV_LAYER = "save_kv_layer"
    WAIT_FOR_SAVE = "wait_for_save"
    END_OF_FORWARD = "end_of_forward"
    GET_FINISHED = "get_finished"
    GET_BLOCK_IDS_WITH_LOAD_ERRORS = "get_block_ids_with_load_errors"
    SHUTDOWN = "shutdown"
    REGISTER_MEM_HOST_POOL = "register_mem_host_pool"
    BATCH_EXISTS = "batch_exists"
    BATCH_GET = "batch_get"
    BATCH_SET = "batch_set"
    CLEAR = "clear"
    GET_STATS = "get_stats"
    LEADER_THREAD = "leader_thread"
    WORKER_THREAD = "worker_thread"
    OTHER = "other"

"""Every setting: its name, environment variable, type, default and meaning. Nothing else happens here."""

from __future__ import annotations

from enum import Enum
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvbm_core.config import readers as r


class Adapter(str, Enum):
    """A way in which an engine uses kvbm; values are names for people."""

    VLLM = "vLLM"
    TRTLLM = "TensorRT-LLM"
    HICACHE = "SGLang's HiCache"
    LINKER = "SGLang's linker"

    def __str__(self) -> str:
        return self.value


_DISK_DIR = "/tmp"  # noqa: S108 - KVBM's default, a directory and not a file name
_TRTLLM = (Adapter.TRTLLM,)
_LED = (Adapter.VLLM, Adapter.TRTLLM)
"""Those with a leader."""
_WITH_HOST_TIER = (*_LED, Adapter.LINKER)
_HOST_IS_SGLANGS = "SGLang has the host tier: --hicache-size or --hicache-ratio"
_CONSOLIDATOR = "the event consolidator is not in this release"


def _setting(
    env: str,
    default: object,
    doc: str,
    *,
    later: str = "",
    lenient: bool = False,
    only: tuple[Adapter, ...] = tuple(Adapter),
    hicache: str = "",
    granted: bool = False,
    is_secret: bool = False,
) -> Any:
    """A field. ``later``: why it has no effect yet. ``lenient``: a bad value warns, the default is used.

    ``only``: the adapters that heed it; the others tell a user who has made it, HiCache's with ``hicache``:
    what there is instead. ``granted``: what it asks for is always so. ``is_secret``: taken from the
    environment alone, and shown nowhere.
    """
    extra: dict[str, Any] = {
        "later": later,
        "lenient": lenient,
        "only": only,
        "hicache": hicache,
        "granted": granted,
        "is_secret": is_secret,
    }
    return Field(default, validation_alias=env, description=doc, json_schema_extra=extra)


class SettingFields(BaseSettings):
    """The fields of KvbmSettings. Variable names are KVBM's, case as is; an empty one counts as unset."""

    model_config = SettingsConfigDict(
        case_sensitive=True, env_ignore_empty=True, extra="forbid", frozen=True, validate_default=False
    )

    # Tiers and sizes
    cpu_cache_gb: r.Gigabytes = _setting(
        "DYN_KVBM_CPU_CACHE_GB",
        None,
        "Host tier, in gigabytes (1e9 bytes), over all tensor-parallel ranks.",
        only=_WITH_HOST_TIER,
        hicache=_HOST_IS_SGLANGS,
    )
    cpu_cache_override_num_blocks: r.OptionalCount = _setting(
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS",
        None,
        "Host tier, in blocks; wins over gigabytes.",
        only=_WITH_HOST_TIER,
        hicache=_HOST_IS_SGLANGS,
    )
    disk_cache_gb: r.GigabytesOrZero = _setting(
        "DYN_KVBM_DISK_CACHE_GB", None, "Disk tier, in gigabytes (1e9 bytes), over all ranks."
    )
    disk_cache_override_num_blocks: r.OptionalCountOrZero = _setting(
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS",
        None,
        "Disk tier, in blocks; wins over gigabytes.",
    )
    disk_cache_dir: r.Text = _setting(
        "DYN_KVBM_DISK_CACHE_DIR", _DISK_DIR, "Directory of the disk tier, created if absent."
    )
    disk_zerofill_fallback: r.Presence = _setting(
        "DYN_KVBM_DISK_ZEROFILL_FALLBACK", False, "Write zeros where fallocate is unsupported."
    )
    disk_disable_o_direct: r.Presence = _setting(
        "DYN_KVBM_DISK_DISABLE_O_DIRECT", False, "Use the page cache for the disk tier."
    )
    disk_allocator_type: r.DiskAllocator = _setting(
        "DYN_KVBM_DISK_ALLOCATOR_TYPE", "default", "How O_DIRECT is set: default or open-direct."
    )
    disable_disk_offload_filter: r.Flag = _setting(
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER",
        False,
        "Offload to disk also what was never hit.",
        only=_WITH_HOST_TIER,
        hicache="SGLang says what is written: --hicache-write-policy",
    )
    disk_deadline_s: r.Seconds = _setting(
        "KVBM_DISK_DEADLINE_S", 10.0, "A read or write of the disk that takes longer is given up."
    )
    disk_io: r.DiskIo = _setting(
        "KVBM_DISK_IO",
        "auto",
        "Reads and writes of the disk: auto, aio, threads, nixl-posix, nixl-gds or nixl-gds-mt.",
    )
    disk_check_at_start: r.OptionalFlag = _setting(
        "KVBM_DISK_CHECK_AT_START",
        None,
        "What a restart finds on the disk is offered once all of it has been read and checked; "
        "unset: yes under TensorRT-LLM, no elsewhere.",
    )
    remote_url: r.RemoteUrl = _setting(
        "KVBM_REMOTE_URL",
        None,
        "Where blocks are kept for all machines: file:// and a directory that they share, s3:// and a "
        "bucket, or redis://, rediss://, mooncake:// and a server. Several, with spaces between them, are "
        "asked in this order.",
    )
    remote_cache_gb: r.GigabytesOrZero = _setting(
        "KVBM_REMOTE_CACHE_GB",
        None,
        "Size of each model's folder in a shared directory, in gigabytes (1e9 bytes), over all machines; "
        "0 = no limit.",
    )
    remote_filter: r.RemoteFilter = _setting(
        "KVBM_REMOTE_FILTER",
        "auto",
        "Which blocks are kept there: all, hit (what was used again) or auto (hit in a bucket, else all).",
    )
    remote_trust: r.RemoteTrust = _setting(
        "KVBM_REMOTE_TRUST",
        "user",
        "Whose blocks are read from a directory: this user's, or those of all of its group (group).",
    )
    remote_username: r.Text = _setting(
        "KVBM_REMOTE_USERNAME", "", "User name at a Valkey or Redis server; empty: its default user."
    )
    remote_password_file: r.Text = _setting(
        "KVBM_REMOTE_PASSWORD_FILE",
        "",
        "File that holds the password of a Valkey or Redis server; read for each connection.",
    )
    remote_ca_file: r.Text = _setting(
        "KVBM_REMOTE_CA_FILE",
        "",
        "Certificates (PEM) of who may sign a Valkey or Redis server's own; empty: the system's.",
    )
    remote_cert_file: r.Text = _setting(
        "KVBM_REMOTE_CERT_FILE",
        "",
        "Certificate and key (PEM, one file) for a Valkey or Redis server that asks for one.",
    )
    remote_deadline_s: r.Seconds = _setting(
        "KVBM_REMOTE_DEADLINE_S",
        5.0,
        "A read or write there that takes longer is given up.",
    )
    remote_secret_file: r.Text = _setting(
        "KVBM_REMOTE_SECRET_FILE",
        "",
        "File with the secret that names there are made with, so that they tell nothing about prompts.",
    )
    remote_encrypt: r.Flag = _setting(
        "KVBM_REMOTE_ENCRYPT",
        False,
        "Encrypt what is kept there (AES-256-GCM), by the secret in KVBM_REMOTE_SECRET_FILE.",
    )
    remote_codec: r.RemoteCodec = _setting(
        "KVBM_REMOTE_CODEC",
        "none",
        "Compress what is kept there: none or zstd (lossless).",
    )
    remote_wait_s: r.SecondsOrZero = _setting(
        "KVBM_REMOTE_WAIT_S",
        2.0,
        "How long a request is held back, at most, while its prefix is brought from there.",
        only=(Adapter.VLLM,),
    )
    remote_load: r.RemoteLoad = _setting(
        "KVBM_REMOTE_LOAD",
        "faster",
        "Which blocks are brought from there: faster (none that the engine computes sooner) or always.",
        only=(Adapter.VLLM, Adapter.TRTLLM),
    )
    remote_head_shards: r.CountOrZero = _setting(
        "KVBM_REMOTE_HEAD_SHARDS",
        0,
        "Blocks are kept there in so many parts, by KV heads: a multiple of all tensor-parallel sizes that "
        "are to share them; 0 = one size alone.",
        only=(Adapter.VLLM,),
    )
    object_enabled: r.Flag = _setting(
        "DYN_KVBM_OBJECT_ENABLED",
        False,
        "Keep blocks in the bucket DYN_KVBM_OBJECT_BUCKET; the same as KVBM_REMOTE_URL=s3://BUCKET.",
    )
    object_bucket: r.OptionalText = _setting(
        "DYN_KVBM_OBJECT_BUCKET",
        None,
        "The bucket; {worker_id} in it stands for the rank.",
    )
    object_endpoint: r.OptionalText = _setting(
        "DYN_KVBM_OBJECT_ENDPOINT",
        None,
        "URL of the S3 server, such as https://s3.example:9000; unset: AWS_ENDPOINT_URL_S3, or AWS.",
    )
    object_region: r.OptionalText = _setting(
        "DYN_KVBM_OBJECT_REGION", None, "Region of the bucket; unset: AWS_REGION, or us-east-1."
    )
    object_access_key: r.Secret = _setting(
        "DYN_KVBM_OBJECT_ACCESS_KEY",
        None,
        "Access key of S3, in the environment only; unset: AWS's usual chain.",
        is_secret=True,
    )
    object_secret_key: r.Secret = _setting(
        "DYN_KVBM_OBJECT_SECRET_KEY", None, "Its secret key, in the environment only.", is_secret=True
    )
    object_num_blocks: r.OptionalCount = _setting(
        "DYN_KVBM_OBJECT_NUM_BLOCKS",
        None,
        "Blocks in object storage.",
        later="what is in a bucket is found by its name, no list of blocks limits it; a lifecycle rule does",
    )
    host_offload_prefix_min_priority: r.Priority = _setting(
        "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY",
        0,
        "Offload stops at the first block of lower retention priority (TensorRT-LLM).",
        only=_TRTLLM,
    )
    disable_write_combined: r.Presence = _setting(
        "DYN_KVBM_DISABLE_WRITE_COMBINED",
        False,
        "Accepted; host memory is never write-combined here.",
        granted=True,
    )
    disable_numa: r.Flag = _setting(
        "DYN_MEMORY_DISABLE_NUMA",
        False,
        "Take host memory from any NUMA node, not from the GPU's.",
        only=_WITH_HOST_TIER,
        hicache=_HOST_IS_SGLANGS,
    )
    enable_numa: r.Flag = _setting(
        "DYN_KVBM_ENABLE_NUMA",
        False,
        "Deprecated by KVBM: accepted, host memory is NUMA-local unless disabled.",
        granted=True,
    )

    # Transfers
    max_concurrent_transfers: r.Count = _setting(
        "DYN_KVBM_MAX_CONCURRENT_TRANSFERS",
        4,
        "Copies in flight at once, per rank and direction.",
        only=_WITH_HOST_TIER,
    )
    max_transfer_batch_size: r.Count = _setting(
        "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE", 16, "Blocks in one batch of copies.", only=_WITH_HOST_TIER
    )
    transfer_deadline_s: r.Seconds = _setting(
        "KVBM_TRANSFER_DEADLINE_S",
        60.0,
        "A transfer not started after this many seconds is given up.",
        only=_WITH_HOST_TIER,
    )
    lease_ttl_s: r.Seconds = _setting(
        "KVBM_LEASE_TTL_S",
        30.0,
        "Seconds that blocks stay pinned for a request that went silent.",
        only=_WITH_HOST_TIER,
    )
    share_wait_s: r.SecondsOrZero = _setting(
        "KVBM_SHARE_WAIT_S",
        1.0,
        "Seconds a request waits for blocks another one is bringing; 0 = never.",
        only=(Adapter.VLLM,),
    )
    sync_onboard_bytes: r.BytesOrZero = _setting(
        "KVBM_SYNC_ONBOARD_BYTES",
        0,
        "TensorRT-LLM: its loop waits for a load of so few bytes from host memory; 0 = requests wait parked.",
        only=_TRTLLM,
    )
    decode_run_tokens: r.CountOrZero = _setting(
        "KVBM_DECODE_RUN_TOKENS",
        128,
        "What decoding fills is stored so many tokens at a time; 0 = each block at once.",
        only=_LED,
    )
    verify_onboard: r.Flag = _setting(
        "KVBM_VERIFY_ONBOARD",
        False,
        "Compare a checksum of every onboarded block; slow, for finding faults.",
        only=_WITH_HOST_TIER,
        hicache="each page has a checksum that is compared anyway",
    )
    audit_rate: r.Share = _setting(
        "KVBM_AUDIT_RATE",
        0.0,
        "Share of hits (0 to 1) that are computed again and compared with what is stored; "
        "0.001 costs little.",
        only=(Adapter.VLLM,),
    )
    load_failure_policy: r.LoadFailurePolicy = _setting(
        "KVBM_LOAD_FAILURE_POLICY",
        "recompute",
        "What a failed onboard does to the request: recompute or fail.",
        only=(Adapter.VLLM,),
    )
    nccl_mla_mode: r.Flag = _setting(
        "DYN_KVBM_NCCL_MLA_MODE",
        False,
        "MLA models with tensor parallelism: rank 0 alone stores, loads and broadcasts to the others.",
        only=_LED,
    )
    nccl_max_ctas: r.OptionalCount = _setting(
        "DYN_KVBM_NCCL_MAX_CTAS",
        None,
        "Limit of NCCL's CTAs in that broadcast; unset: NCCL's own choice.",
        only=_LED,
    )

    # Leader and workers
    leader_worker_init_timeout_s: r.Seconds = _setting(
        "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS",
        1800.0,
        "After this many seconds without all workers an error names those missing; the engine serves.",
        only=_LED,
    )
    start_wait_s: r.SecondsOrZero = _setting(
        "KVBM_START_WAIT_S",
        5.0,
        "Seconds the start waits for the first slots and what is on disk; then the engine serves without.",
        only=_WITH_HOST_TIER,
    )
    leader_zmq_host: r.Host = _setting(
        "DYN_KVBM_LEADER_ZMQ_HOST", "127.0.0.1", "Address of the leader's channel.", only=_LED
    )
    leader_zmq_pub_port: r.Port = _setting(
        "DYN_KVBM_LEADER_ZMQ_PUB_PORT",
        56001,
        "Accepted, never bound: one port carries both ways. Must differ from the other.",
        later="leader and workers talk both ways over DYN_KVBM_LEADER_ZMQ_ACK_PORT",
        lenient=True,
        only=_LED,
    )
    leader_zmq_ack_port: r.Port = _setting(
        "DYN_KVBM_LEADER_ZMQ_ACK_PORT",
        56002,
        "Port on which leader and workers meet.",
        lenient=True,
        only=_LED,
    )
    runtime_enabled: r.Flag = _setting(
        "DYN_RUNTIME_ENABLED_KVBM",
        False,
        "Use Dynamo's distributed runtime.",
        later="Dynamo's runtime is not used in this release",
    )

    # Metrics, logs, events
    metrics: r.Flag = _setting("DYN_KVBM_METRICS", False, "Serve Prometheus metrics.")
    metrics_port: r.Port = _setting(
        "DYN_KVBM_METRICS_PORT",
        6880,
        "Port of /metrics; engines of a data-parallel group, and SGLang's ranks, each add their number.",
        lenient=True,
    )
    metrics_host: r.Host = _setting("KVBM_METRICS_HOST", "0.0.0.0", "Address /metrics is bound to.")
    cache_stats_max_requests: r.Count = _setting(
        "DYN_KVBM_CACHE_STATS_MAX_REQUESTS", 1000, "Requests in the sliding window of the hit rates."
    )
    cache_stats_log_interval_s: r.Seconds = _setting(
        "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS",
        5.0,
        "Seconds between two hit-rate lines in the log.",
        only=_LED,
    )
    log_level: r.LogLevel = _setting(
        "DYN_LOG", "info", "Log level of kvbm: error, warn, info, debug, trace or off.", lenient=True
    )
    native: r.Flag = _setting(
        "KVBM_NATIVE",
        True,
        "Use the native module; in the environment only. Without it Python code does the same, slower.",
        lenient=True,
    )
    enable_record: r.Flag = _setting(
        "DYN_KVBM_ENABLE_RECORD",
        False,
        "Record the connector's calls.",
        later="recording is not in this release",
    )
    events_medium: r.Word = _setting(
        "KVBM_EVENTS_MEDIUM", "CPU_TIER1", "Name of the host tier in KV events.", only=(Adapter.VLLM,)
    )
    kv_events_enable_consolidator: r.Flag = _setting(
        "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR",
        True,
        "Merge the engine's and kvbm's events.",
        later=_CONSOLIDATOR,
    )
    kv_events_consolidator_mode: r.ConsolidatorMode = _setting(
        "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE",
        "dedup",
        "dedup or passthrough.",
        later=_CONSOLIDATOR,
        lenient=True,
    )
    trtllm_zmq_port: r.OptionalPort = _setting(
        "DYN_KVBM_TRTLLM_ZMQ_PORT",
        None,
        "Port of TensorRT-LLM's event publisher.",
        later=_CONSOLIDATOR,
        lenient=True,
    )
    fatbin_path: r.Text = _setting(
        "DYN_FATBIN_PATH", "", "KVBM's copy kernels.", later="kvbm needs no kernel file"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The extra config first, then the environment; no files."""
        return init_settings, env_settings

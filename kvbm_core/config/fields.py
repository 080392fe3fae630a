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
    eviction_policy: r.Word = _setting(
        "KVBM_EVICTION_POLICY",
        "lru",
        "Which blocks of host and disk go when there is no room: lru (the least recently used), or the name "
        "of a policy that an installed package has (entry point kvbm.policies).",
    )
    disk_deadline_s: r.Seconds = _setting(
        "KVBM_DISK_DEADLINE_S", 10.0, "A read or write of the disk that takes longer is given up."
    )
    disk_io: r.DiskIo = _setting(
        "KVBM_DISK_IO",
        "auto",
        "Reads and writes of the disk: auto, aio, threads, nixl-posix, nixl-gds or nixl-gds-mt.",
    )
    disk_to_device: r.DiskToDevice = _setting(
        "KVBM_DISK_TO_DEVICE",
        "off",
        "Without a host tier, blocks are read straight from disk into GPU memory: nixl-gds-mt or nixl-gds "
        "(nixl-posix: a KV cache in host memory); or off.",
        only=_WITH_HOST_TIER,
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
        "bucket, redis://, rediss://, mooncake:// and a server, or the scheme of a store that an installed "
        "package has (entry point kvbm.stores). Several, with spaces between them, are asked in this order.",
    )
    remote_cache_gb: r.GigabytesOrZero = _setting(
        "KVBM_REMOTE_CACHE_GB",
        None,
        "Size of each model's folder in a shared directory, in gigabytes (1e9 bytes), over all machines; "
        "0 = no limit; unset: what is written in that folder, which the first engine does: half of what is "
        "free.",
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
        "Encrypt what is kept there (AES-256-GCM), by the secret in KVBM_REMOTE_SECRET_FILE. Needs the "
        "extra crypto.",
    )
    remote_codec: r.RemoteCodec = _setting(
        "KVBM_REMOTE_CODEC",
        "none",
        "Make what is kept there smaller: none, zstd (lossless) or fp8 (lossy, vLLM only). zstd needs the "
        "extra zstd.",
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
    peers: r.Peers = _setting(
        "KVBM_PEERS",
        "off",
        "Copy blocks from the instance that a router's hint names, and give them to others: over zmq, or by "
        "nixl, which needs a network that nobody else is on; or off.",
        only=(Adapter.VLLM,),
    )
    peer_bind: r.Address = _setting(
        "KVBM_PEER_BIND",
        "127.0.0.1:56100",
        "Address and port at which others ask rank 0 for blocks; each further rank takes the next port. "
        "One that other machines reach needs KVBM_CURVE_KEY_FILE.",
        only=(Adapter.VLLM,),
    )
    peer_deadline_s: r.Seconds = _setting(
        "KVBM_PEER_DEADLINE_S",
        2.0,
        "An instance that has not answered by then is left alone for a while.",
        only=(Adapter.VLLM,),
    )
    peer_export_gb: r.Gigabytes = _setting(
        "KVBM_PEER_EXPORT_GB",
        0.25,
        "Memory of each rank for copies of blocks on their way to others, in gigabytes (1e9 bytes).",
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
        "Transfers in flight at once between a rank's GPU and host memory, both ways together; a KV cache in "
        "CPU memory: always one.",
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
    state_every_tokens: r.CountOrZero = _setting(
        "KVBM_STATE_EVERY_TOKENS",
        4096,
        "Hybrid models (Mamba, gated delta net): states inside a prompt, and older ones of an answer, are "
        "kept at least so many tokens apart; 0 = each that the engine hands over.",
        only=(Adapter.VLLM,),
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
        "MLA models with tensor parallelism: KV is stored once on each machine; the rank that stores it "
        "sends what it loads to the others.",
        only=_WITH_HOST_TIER,
    )
    nccl_max_ctas: r.OptionalCount = _setting(
        "DYN_KVBM_NCCL_MAX_CTAS",
        None,
        "Limit of NCCL's CTAs in that broadcast; unset: NCCL's own choice.",
        only=_WITH_HOST_TIER,
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
        "Never bound: one port carries both ways. Consolidated KV events are published 1000 above it. Must "
        "differ from the other.",
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
    etcd_endpoints: r.Text = _setting(
        "ETCD_ENDPOINTS",
        "",
        "URLs of etcd, with commas between them: there leader and workers on several machines find each "
        "other, if they have keys, and kvbm fleet finds who takes orders.",
    )
    etcd_auth_ca: r.Text = _setting(
        "ETCD_AUTH_CA", "", "Certificates (PEM) of who may sign etcd's; unset: the system's."
    )
    etcd_auth_client_cert: r.Text = _setting(
        "ETCD_AUTH_CLIENT_CERT", "", "Certificate (PEM) by which etcd knows us."
    )
    etcd_auth_client_key: r.Text = _setting("ETCD_AUTH_CLIENT_KEY", "", "The key (PEM) of that certificate.")
    etcd_auth_username: r.Text = _setting(
        "ETCD_AUTH_USERNAME", "", "User name at etcd, where it goes by passwords."
    )
    etcd_auth_password: r.Secret = _setting(
        "ETCD_AUTH_PASSWORD", None, "Its password, in the environment only.", is_secret=True
    )
    fleet: r.Word = _setting(
        "KVBM_FLEET", "default", "Name of the engines that belong together, in one etcd and one NATS."
    )
    fleet_lease_s: r.Seconds = _setting(
        "KVBM_FLEET_LEASE_S",
        15.0,
        "So long after an instance has gone silent etcd forgets it; it says that it is there three times as "
        "often.",
    )
    fleet_insecure: r.Flag = _setting(
        "KVBM_FLEET_INSECURE",
        False,
        "Speak with an etcd or a NATS server on another machine without TLS; take orders over HTTP from one.",
    )
    curve_key_file: r.Text = _setting(
        "KVBM_CURVE_KEY_FILE",
        "",
        "This process' CURVE key pair (a .key_secret file, made by: kvbm keys new FOLDER); needed where a "
        "socket can be reached from other machines.",
    )
    curve_allowed: r.Text = _setting(
        "KVBM_CURVE_ALLOWED",
        "",
        "Public keys of those who may speak with us: a folder of .key files, or one file.",
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
        "Record requests for kvbm plan and kvbm replay: times, lengths, numbers of blocks, no text.",
        only=_LED,
    )
    record_dir: r.Text = _setting(
        "KVBM_RECORD_DIR", f"{_DISK_DIR}/kvbm-record", "Where recordings are written.", only=_LED
    )
    record_gb: r.Gigabytes = _setting(
        "KVBM_RECORD_GB", 1.0, "The last so many gigabytes of a recording are kept.", only=_LED
    )
    events_medium: r.Word = _setting(
        "KVBM_EVENTS_MEDIUM", "CPU_TIER1", "Name of the host tier in KV events.", only=_WITH_HOST_TIER
    )
    events: r.EventWays = _setting(
        "KVBM_EVENTS",
        "off",
        "Publish KV events: zmq, nats or zmq,nats; or off. Besides, vLLM publishes them with its own.",
    )
    events_endpoint: r.Text = _setting(
        "KVBM_EVENTS_ENDPOINT",
        "tcp://127.0.0.1:5567",
        "Where KV events are published over ZMQ (tcp:// or ipc://); data-parallel ranks add their number.",
    )
    events_replay_endpoint: r.Text = _setting(
        "KVBM_EVENTS_REPLAY_ENDPOINT",
        "tcp://127.0.0.1:5667",
        "Where readers ask for what they missed, or for all; data-parallel ranks add their number.",
    )
    events_topic: r.Text = _setting("KVBM_EVENTS_TOPIC", "", "Topic of the ZMQ messages.")
    instance: r.Word = _setting(
        "KVBM_INSTANCE", "", "Name of this instance in its fleet; unset: random, new at each start."
    )
    control: r.ControlWays = _setting(
        "KVBM_CONTROL",
        "socket",
        "Answer kvbm why and operators' orders (kvbm fleet, pin, quota, clear ...): over a private socket of "
        "this machine (socket), HTTP with a token (http), NATS (nats), several with commas; or off.",
    )
    why_requests: r.CountOrZero = _setting(
        "KVBM_WHY_REQUESTS",
        1000,
        "How many of the last requests are remembered, with why they missed the cache (kvbm why); 0: none.",
        only=_WITH_HOST_TIER,
    )
    traces: r.Traces = _setting(
        "KVBM_TRACES",
        "auto",
        "Send OpenTelemetry spans of requests and transfers (extra otel): on, off, or auto: if an "
        "OTEL_EXPORTER_OTLP_ENDPOINT is set.",
    )
    control_http: r.Address = _setting(
        "KVBM_CONTROL_HTTP",
        "127.0.0.1:6890",
        "Where orders are taken over HTTP; data-parallel ranks add their number.",
    )
    control_token_file: r.Text = _setting(
        "KVBM_CONTROL_TOKEN_FILE",
        "",
        "File with the token of those whose orders are taken over HTTP; readable by its owner alone.",
    )
    control_operators: r.Text = _setting(
        "KVBM_CONTROL_OPERATORS",
        "",
        "Public keys (U...) of those whose orders are taken over NATS, with commas between them; kvbm keys "
        "operator FILE makes one.",
    )
    nats_server: r.Text = _setting(
        "NATS_SERVER",
        "nats://127.0.0.1:4222",
        "NATS servers for KV events and orders, with commas between them.",
    )
    nats_username: r.OptionalText = _setting("NATS_AUTH_USERNAME", None, "User of NATS.")
    nats_password: r.Secret = _setting(
        "NATS_AUTH_PASSWORD", None, "Password of NATS; in the environment only.", is_secret=True
    )
    nats_token: r.Secret = _setting(
        "NATS_AUTH_TOKEN", None, "Token of NATS; in the environment only.", is_secret=True
    )
    nats_nkey: r.Secret = _setting(
        "NATS_AUTH_NKEY", None, "NKey seed of NATS; in the environment only.", is_secret=True
    )
    nats_credentials_file: r.OptionalText = _setting(
        "NATS_AUTH_CREDENTIALS_FILE", None, "File with credentials of NATS (.creds)."
    )
    nats_ca_file: r.OptionalText = _setting(
        "KVBM_NATS_CA_FILE", None, "Certificates of authorities that NATS servers are checked against."
    )
    nats_cert_file: r.OptionalText = _setting(
        "KVBM_NATS_CERT_FILE", None, "Our certificate and its key for NATS, in one file."
    )
    kv_events_enable_consolidator: r.Flag = _setting(
        "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR",
        True,
        "Under Dynamo: merge the device's KV events and kvbm's into the one stream that it reads.",
        only=_LED,
    )
    kv_events_consolidator_mode: r.ConsolidatorMode = _setting(
        "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE",
        "dedup",
        "dedup: a block is stored while it is anywhere; passthrough: all events, each with its medium.",
        lenient=True,
        only=_LED,
    )
    trtllm_zmq_port: r.OptionalPort = _setting(
        "DYN_KVBM_TRTLLM_ZMQ_PORT",
        None,
        "Port at which dynamo.trtllm publishes TensorRT-LLM's KV events; they are consolidated if it is set.",
        lenient=True,
        only=_TRTLLM,
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

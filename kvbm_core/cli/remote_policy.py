"""``kvbm remote policy``: what bounds a store of each kind, as text to apply. It asks nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from kvbm_core.config.remote_url import remote_directory
from kvbm_core.storage.remote.names import TOP

LIFECYCLE, RIGHTS = "lifecycle", "rights"
_BUCKET = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,255}", re.ASCII)
_KINDS = "file://, s3://, gs://, az://, redis://, rediss://, valkey://, valkeys:// and mooncake://"
_VALKEY_RIGHTS = (
    "+set +get +getrange +strlen +exists +unlink +touch +scan +info +select +object|idletime +client|no-touch"
)


def policy_text(url: str, days: int, only: str) -> str:
    """What to say of the store with this URL; ``only`` one of its documents, LIFECYCLE or RIGHTS, if that is
    not empty. ValueError with the remedy.
    """
    if only not in ("", LIFECYCLE, RIGHTS):
        raise ValueError(f"--only is {LIFECYCLE} or {RIGHTS}")
    scheme = url.partition("://")[0].lower()
    if scheme in _BUCKETS:
        bucket, prefix = _bucket_of(url)
        return _BUCKETS[scheme](bucket, prefix, days, only)
    if only:
        raise ValueError("--only is for buckets")
    if scheme == "file":
        return _FILE.format(path=remote_directory(url))
    if scheme in ("redis", "rediss", "valkey", "valkeys"):
        return _VALKEY
    if scheme == "mooncake":
        return _MOONCAKE
    raise ValueError(f"no store has such a URL; there are {_KINDS}")


# -------------------------------------------------------------------- buckets


def _bucket_of(url: str) -> tuple[str, str]:
    """Its name, and the prefix of all names of records in it."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError("write a bucket, with a prefix or without, such as s3://kv-cache/team")
    return bucket, "/".join(filter(None, [*prefix.split("/"), TOP])) + "/"


def _document(document: object) -> str:
    return json.dumps(document, indent=2)


def _s3(bucket: str, prefix: str, days: int, only: str) -> str:
    lifecycle, rights = _document(s3_lifecycle(prefix, days)), _document(s3_rights(bucket, prefix))
    if only:
        return lifecycle if only == LIFECYCLE else rights
    url = f"s3://{bucket}/{prefix.removesuffix(f'{TOP}/')}".rstrip("/")
    return f"""\
# What was not used for {days} days goes, by a rule of the bucket. It takes the place of all rules that the
# bucket has (see them with: aws s3api get-bucket-lifecycle-configuration --bucket {bucket}).
# Save it and apply it:
#   kvbm remote policy {url} --days {days} --only lifecycle > lifecycle.json
#   aws s3api put-bucket-lifecycle-configuration --bucket {bucket} \\
#     --lifecycle-configuration file://lifecycle.json
{lifecycle}

# What engines need, and no more. Write your role for Principal. Without s3:PutObject and s3:DeleteObject an
# engine only reads. s3:ListBucket also makes an object that is not there a 404, as it has to be, and no 403.
#   kvbm remote policy {url} --only rights > rights.json
#   aws s3api put-bucket-policy --bucket {bucket} --policy file://rights.json
{rights}"""


def s3_lifecycle(prefix: str, days: int) -> dict[str, object]:
    """For put-bucket-lifecycle-configuration. What is gone, or was broken off, costs space for a day more."""
    rule = {
        "ID": "kvbm",
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "Expiration": {"Days": days},
        "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }
    return {"Rules": [rule]}


def s3_rights(bucket: str, prefix: str) -> dict[str, object]:
    """For put-bucket-policy."""
    principal = {"AWS": "arn:aws:iam::123456789012:role/ENGINES"}
    statements = [
        {
            "Sid": "KvbmRecords",
            "Effect": "Allow",
            "Principal": principal,
            "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"],
            "Resource": f"arn:aws:s3:::{bucket}/{prefix}*",
        },
        {
            "Sid": "KvbmBucket",
            "Effect": "Allow",
            "Principal": principal,
            "Action": "s3:ListBucket",
            "Resource": f"arn:aws:s3:::{bucket}",
        },
    ]
    return {"Version": "2012-10-17", "Statement": statements}


def _gs(bucket: str, prefix: str, days: int, only: str) -> str:
    rule = {"action": {"type": "Delete"}, "condition": {"age": days, "matchesPrefix": [prefix]}}
    return _other_bucket(
        _document({"rule": [rule]}),
        f"gcloud storage buckets update gs://{bucket} --lifecycle-file=lifecycle.json",
        "roles/storage.objectUser on the bucket",
        only,
    )


def _az(bucket: str, prefix: str, days: int, only: str) -> str:
    actions = {"baseBlob": {"delete": {"daysAfterModificationGreaterThan": days}}}
    filters = {"blobTypes": ["blockBlob"], "prefixMatch": [f"{bucket}/{prefix}"]}
    definition = {"actions": actions, "filters": filters}
    rule = {"enabled": True, "name": "kvbm", "type": "Lifecycle", "definition": definition}
    command = "az storage account management-policy create --account-name ACCOUNT --resource-group GROUP"
    return _other_bucket(
        _document({"rules": [rule]}),
        f"{command} --policy @lifecycle.json",
        '"Storage Blob Data Contributor" on the container',
        only,
    )


def _other_bucket(lifecycle: str, command: str, rights: str, only: str) -> str:
    if only == RIGHTS:
        raise ValueError(f"there is no document for it; give engines {rights}")
    if only:
        return lifecycle
    return f"""# Save it as lifecycle.json; it takes the place of all rules that are there:
#   {command}
# Engines need {rights}.
{lifecycle}"""


_BUCKETS: dict[str, Callable[[str, str, int, str], str]] = {"s3": _s3, "gs": _gs, "az": _az}

# -------------------------------------------------------------------- others

_FILE = """\
# The engines keep {path} within its size: KVBM_REMOTE_CACHE_GB, of each model.
# Where that is 0 (no limit), a cron job does it:
#   kvbm remote sweep file://{path} --max-gb 500"""

_VALKEY = f"""\
# The server bounds itself: in its configuration file, with the size that it may have:
maxmemory 64gb
maxmemory-policy allkeys-lru
save ""
appendonly no
# A user who may do what engines do, and no more; the password is in KVBM_REMOTE_PASSWORD_FILE of the engines:
user kvbm on >PASSWORD resetchannels ~{TOP}/* -@all {_VALKEY_RIGHTS}"""

_MOONCAKE = """\
# Storage nodes bound it: what each of them gives is its global_segment_size. When so much of all that is
# taken, the master evicts so many of the objects, those that were used longest ago:
mooncake_master --eviction_high_watermark_ratio=0.9 --eviction_ratio=0.05"""

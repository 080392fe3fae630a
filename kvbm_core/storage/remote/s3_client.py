"""A client of an object store by obstore: its address, its time-outs, and where its credentials come from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from kvbm_core.config.remote_url import Bucket
from kvbm_core.errors import ConfigError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CONNECT_TIMEOUT_S = 1.0
IDLE_CONNECTION_S = 20.0
"""Kept open so long; servers close after a minute or so, and what they have closed costs a retry."""
REFRESH_S = 600.0
"""Credentials of a profile are asked for again after so long: they may have been renewed."""
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_ROLES = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
_OTHER_ROLES = ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE")
_PACKAGES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}


@dataclass(frozen=True, slots=True)
class S3Options:
    """KVBM's own settings of an object store. None: as the usual variables (AWS_*) say."""

    endpoint: str | None = None
    region: str | None = None
    access_key: SecretStr | None = None
    secret_key: SecretStr | None = None


StoreMaker = Callable[[float], "ObjectStore"]
"""A client whose requests take so many seconds at most."""


def store_maker(bucket: Bucket, options: S3Options, environ: Mapping[str, str] = os.environ) -> StoreMaker:
    """How clients of ``bucket`` are made. ConfigError, one line, if something that they need is not there.

    Nothing is sent yet.
    """
    if find_spec("obstore") is None:
        raise ConfigError(
            "KVBM_REMOTE_URL", bucket.url, "needs obstore; run pip install 'obstore>=0.12.1,<0.13'"
        )
    if bucket.scheme == "s3":
        options_of_kind, is_plain = _s3(options, environ)
    else:
        options_of_kind, is_plain = {}, False
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "pool_idle_timeout": timedelta(seconds=IDLE_CONNECTION_S),
        "allow_http": is_plain,
        **_authority(environ),
    }

    def make(timeout_s: float) -> ObjectStore:
        import obstore.store

        kind = getattr(obstore.store, _PACKAGES[bucket.scheme])
        store: ObjectStore = kind(
            bucket.name,
            prefix=bucket.prefix or None,
            client_options={**client, "timeout": timedelta(seconds=timeout_s)},
            # We try again ourselves: within the caller's deadline, which obstore does not know.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)},
            **options_of_kind,
        )
        return store

    return make


def endpoint_of(options: S3Options, environ: Mapping[str, str] = os.environ) -> tuple[str, str | None]:
    """The setting that says where the server is, and its value. None: AWS itself."""
    own = "DYN_KVBM_OBJECT_ENDPOINT"
    if options.endpoint:
        return own, options.endpoint
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next(((name, environ[name]) for name in names if environ.get(name)), (own, None))


def _s3(options: S3Options, environ: Mapping[str, str]) -> tuple[dict[str, Any], bool]:
    """Keyword arguments of an S3Store, and whether it speaks plain HTTP."""
    setting, endpoint = endpoint_of(options, environ)
    scheme = _scheme_of(setting, endpoint) if endpoint else "https"
    found: dict[str, Any] = {"disable_bulk_delete": True}
    if endpoint:
        found["aws_endpoint_url_s3"] = endpoint
    if options.region:
        found["region"] = options.region
    if "AWS_UNSIGNED_PAYLOAD" not in environ:
        found["unsigned_payload"] = scheme == "https"  # TLS protects it; a digest would cost 0.6 CPU s/GB
    if options.access_key is not None and options.secret_key is not None:
        found["access_key_id"] = options.access_key.get_secret_value()
        found["secret_access_key"] = options.secret_key.get_secret_value()
    elif _wants_profile(environ):
        found["credential_provider"] = _Profile()
    return found, scheme == "http"


def _scheme_of(setting: str, endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query
    except ValueError:
        is_good = False
    if not is_good or "@" in endpoint:
        remedy = "write https:// or http://, a host and a port, such as https://s3.example:9000"
        raise ConfigError(setting, "(not shown)", remedy)
    return parts.scheme


def _authority(environ: Mapping[str, str]) -> dict[str, bytes]:
    path = environ.get("AWS_CA_BUNDLE")
    if not path:
        return {}
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError("AWS_CA_BUNDLE", path, f"{error.strerror}; name a file of certificates") from error
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise ConfigError("AWS_CA_BUNDLE", path, "no certificate is in it; name a file in PEM")
    return {"root_certificate": content}


def _wants_profile(environ: Mapping[str, str]) -> bool:
    """Whether credentials come from AWS's files, which obstore does not read. ConfigError if boto3, which
    does, is wanted and not there.
    """
    name = environ.get("AWS_PROFILE")
    if not name:
        if any(map(environ.get, (*_KEYS, *_ROLES, *_OTHER_ROLES))):
            return False
        home = Path(environ.get("HOME") or "~").expanduser() / ".aws"
        files = environ.get("AWS_SHARED_CREDENTIALS_FILE"), environ.get("AWS_CONFIG_FILE")
        paths = (Path(files[0] or home / "credentials"), Path(files[1] or home / "config"))
        return find_spec("boto3") is not None and any(map(os.path.isfile, paths))
    if find_spec("boto3") is None:
        raise ConfigError("AWS_PROFILE", name, "needs boto3; run pip install boto3, or set AWS_ACCESS_KEY_ID")
    return True


class _Profile:
    """Credentials by boto3's chain: profiles, single sign-on, roles of roles. obstore calls it."""

    def __init__(self) -> None:
        self._credentials: Any = None

    def __call__(self) -> dict[str, Any]:
        if self._credentials is None:
            import boto3

            self._credentials = boto3.Session().get_credentials()
        if self._credentials is None:
            raise ValueError("there are no credentials in this profile")
        keys = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(seconds=REFRESH_S),
        }

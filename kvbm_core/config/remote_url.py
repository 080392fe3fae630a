"""Where blocks are kept for all machines: a URL, whose scheme says what kind of store it is."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvbm_core.config.server_url import SERVER_SCHEMES, server_url

SCHEMES = {"file", *SERVER_SCHEMES}
"""Those for which there is a store; see kvbm_core.storage.stores."""

_REMEDY = "write file:// and the absolute path of a directory that all machines share, such as file:///mnt/kv"


def read_remote_url(value: object) -> str | None:
    """``value`` if it can be used. ValueError with the remedy."""
    if value is None:
        return None
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(_REMEDY)
    text = value.strip()
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if scheme not in ("", *SCHEMES):
        raise ValueError(f"{scheme} is not in this release; {_REMEDY}")
    if scheme in ("", "file"):
        remote_directory(text)
    elif scheme in SERVER_SCHEMES:
        server_url(text)
    return text


def remote_directory(url: str) -> Path:
    """The directory that a file:// URL names. ValueError with the remedy."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(_REMEDY) from error
    path = unquote(parts.path)
    if parts.scheme != "file":
        raise ValueError(_REMEDY)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"{_REMEDY}; what follows two slashes names a machine")
    if parts.query or parts.fragment:
        raise ValueError(f"{_REMEDY}; a ? or # ends the path, write %3F or %23 if its name has one")
    if not path.startswith("/") or "\0" in path:
        raise ValueError(_REMEDY)
    if Path(path) == Path("/"):
        raise ValueError(f"{_REMEDY}; this one is the root of all files")
    return Path(path)

"""Where blocks are kept for all machines: URLs, whose schemes say what kind of store each is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from os.path import normpath
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from kvbm_core.config.installed import STORES, package_of
from kvbm_core.config.server_url import MOONCAKE_SCHEME, SERVER_SCHEMES, server_url

SCHEMES = {"file", "s3", "gs", "az", *SERVER_SCHEMES}
"""Those for which there is a store; see kvbm_core.storage.stores. Installed packages may have more."""
BUCKET_SCHEMES = ("s3", "gs", "az")
"""Those of object stores."""

_SECRETS = "no name or password belongs there; give it to the store in a way of its own"
_REMEDY = "write file:// and the absolute path of a directory that all machines share, such as file:///mnt/kv"
_BUCKET_REMEDY = "write s3:// and a bucket, with a prefix or without, such as s3://kv-cache/team"
_AROUND_URLS = " \t\r\n,"
_BETWEEN_URLS = re.compile(r"[\s,]+(?=[A-Za-z][A-Za-z0-9+.-]*://)")
_BUCKET = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9._-]|\{worker_id\}){1,255}", re.ASCII)
_PREFIX = re.compile(r"[a-zA-Z0-9!_.*'()/=-]*", re.ASCII)


class Bucket(NamedTuple):
    """A place in an object store. ``prefix``: without slashes at its ends."""

    scheme: str
    name: str
    prefix: str

    @property
    def url(self) -> str:
        """As one would write it."""
        return f"{self.scheme}://{self.name}" + (f"/{self.prefix}" if self.prefix else "")


def read_remote_urls(value: object) -> str | None:
    """One URL or several, with a space between them. ValueError with the remedy."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(_REMEDY)
    urls, texts = list[str](), split_urls(value)
    for number, text in enumerate(texts, 1):
        try:
            urls.append(read_remote_url(text))
        except ValueError as error:
            raise ValueError(f"number {number}: {error}" if len(texts) > 1 else str(error)) from None
    if len(set(map(_place_of, urls))) < len(urls):
        raise ValueError("names a store twice; name each once, the one to ask first in front")
    return " ".join(urls)


def split_urls(text: str) -> list[str]:
    """The URLs in ``text``. Spaces within the path of a directory are part of it."""
    return _BETWEEN_URLS.split(text.strip(_AROUND_URLS))


def _place_of(url: str) -> object:
    """Equal for URLs that can be seen to name one store."""
    scheme = scheme_of(url)
    if scheme in SERVER_SCHEMES:
        return server_url(url)._replace(scheme=MOONCAKE_SCHEME if scheme == MOONCAKE_SCHEME else "")
    return normpath(remote_directory(url)) if scheme in ("", "file") else url


def scheme_of(url: str) -> str:
    """In small letters; empty if there is none."""
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator else ""


def read_remote_url(value: object) -> str:
    """``value`` if it can be used. ValueError with the remedy."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(_REMEDY)
    text = value.strip()
    scheme = scheme_of(text)
    if scheme not in ("", *SCHEMES):
        installed_store(scheme)
        if "@" in text:
            raise ValueError(_SECRETS)
    elif scheme in ("", "file"):
        lone = text.partition(":")[0].lower()
        if not scheme and lone != "file" and lone in {*SCHEMES, *entry_points(group=STORES).names}:
            raise ValueError(f"write {lone}:// and what follows, with two slashes or three")
        remote_directory(text)
    elif scheme in SERVER_SCHEMES:
        server_url(text)
    elif scheme in BUCKET_SCHEMES:
        return remote_bucket(text).url
    return text


def installed_store(scheme: str) -> EntryPoint:
    """What an installed package has for URLs of this scheme; nothing of it is imported. ValueError with the
    remedy.
    """
    installed = entry_points(group=STORES)
    found = [entry for entry in installed if entry.name.lower() == scheme]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"there is more than one such store: {_told(found)}; uninstall all but one")
    known = ", ".join(f"{name}://" for name in sorted(SCHEMES))
    more = _told(installed) or "none"
    raise ValueError(f"no store has such a URL; there are {known}; of installed packages: {more}")


def _told(entries: Iterable[EntryPoint]) -> str:
    return ", ".join(sorted(f"{entry.name}:// of {package_of(entry)}" for entry in entries))


def remote_bucket(url: str) -> Bucket:
    """The bucket that a URL names. ValueError with the remedy."""
    scheme, _, rest = url.partition("://")
    if "@" in rest:
        where = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the engine's environment, or give it a role"
        raise ValueError(f"credentials do not belong in a URL; put them in {where}")
    name, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    is_path = "//" not in prefix and not {".", ".."}.intersection(prefix.split("/"))
    if scheme.lower() not in BUCKET_SCHEMES or not _BUCKET.fullmatch(name):
        raise ValueError(_BUCKET_REMEDY)
    if not _PREFIX.fullmatch(prefix) or not is_path:
        raise ValueError(f"{_BUCKET_REMEDY}; a prefix has letters, digits, dashes and slashes")
    return Bucket(scheme.lower(), name, prefix)


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

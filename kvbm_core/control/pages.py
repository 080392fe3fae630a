"""Where the metrics pages of this user's engines on this machine are.

A file for each page, beside the private sockets; its engine holds it locked for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
from pathlib import Path

import msgspec

from kvbm_core.config.addresses import bracketed
from kvbm_core.control.place import is_private, private_place

log = logging.getLogger("kvbm")

SUFFIX, DRAFT = ".page", ".draft"
MAX_FILE_BYTES = 4096
MAX_SHOWN_NAME = 32
EVERY_ADDRESS = ("0.0.0.0", "::", "")
_HOST = re.compile(r"\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}", re.ASCII)


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """``host``: the address that the page is bound to; see EVERY_ADDRESS. ``about``: the labels of
    kvbm_info.
    """

    host: str
    port: int
    about: dict[str, str]

    @property
    def name(self) -> str:
        """Instance and rank, as ``kvbm fleet`` names them."""
        return f"{self.about.get('name', '')}.{self.about.get('rank', '0')}"

    def address(self, host: str = "127.0.0.1") -> str:
        """Host and port; of a page that is bound to every address, ``host`` is one of them."""
        bound = host if self.host in EVERY_ADDRESS else self.host
        return f"{bracketed(bound.strip('[]'))}:{self.port}"


class PageNote:
    """The file of one page, until ``close``. None of it is worth more than a line in the log."""

    def __init__(self, page: Page) -> None:
        self._descriptor: int | None = None
        self._path: Path | None = None
        try:
            self._write(page)
        except OSError as error:
            log.warning("kvbm: kvbm status and top will not find this engine by themselves: %s", error)

    def _write(self, page: Page) -> None:
        folder = private_place()
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not is_private(folder):
            raise OSError(f"TMPDIR={folder.parent}: {folder} is not private to this user")
        name = f"{page.about.get('name', '')[:MAX_SHOWN_NAME]}.{page.about.get('rank', '0')}"
        path = folder / f"{name}-{secrets.token_hex(4)}{SUFFIX}"
        draft = path.with_suffix(DRAFT)
        self._descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # before it has the name by which it is found
        os.write(self._descriptor, msgspec.json.encode(page))
        draft.rename(path)
        self._path = path

    def close(self) -> None:
        """May be called twice."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._path = self._descriptor = None


def pages() -> list[Page]:
    """Those that are there; files of engines that are gone are removed."""
    place = private_place()
    if not is_private(place):
        return []
    found = [_read(path) for path in place.glob(f"*{SUFFIX}")]
    return sorted((page for page in found if page is not None), key=lambda page: (page.name, page.port))


def _read(path: Path) -> Page | None:
    try:
        with path.open("rb") as file:
            with contextlib.suppress(BlockingIOError):  # held: its engine lives
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink()
                return None
            return msgspec.json.decode(file.read(MAX_FILE_BYTES), type=Page)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def targets(asked_host: str) -> str:
    """All pages of this machine, as Prometheus's HTTP discovery wants them. ``asked_host``: the Host that the
    question names; who reaches one page by it reaches the others too.
    """
    host = asked_host.strip()
    host = host if host.endswith("]") else host.rpartition(":")[0] or host
    if not _HOST.fullmatch(host):
        host = "127.0.0.1"
    found = [
        {
            "targets": [page.address(host)],
            "labels": {f"__meta_kvbm_{label}": value for label, value in page.about.items()},
        }
        for page in pages()
    ]
    return msgspec.json.encode(found).decode()

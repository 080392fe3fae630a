"""Where the hub's cache keeps a model, and which of its files are as they were downloaded.

Reads the folders themselves: importing huggingface_hub takes up to half a second of the caller's thread.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Snapshot(NamedTuple):
    """A revision of a model in the hub's cache. ``ref``: the file that says which commit a branch's name
    means, None if the revision is a commit.
    """

    folder: Path
    ref: Path | None


def cache_folder(cache_dir: str = "") -> Path:
    """The hub's cache: ``cache_dir``, or where huggingface_hub's variables say, or its usual place."""
    given = cache_dir or os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def snapshot_of(name: str, revision: str = "", cache_dir: str = "") -> Snapshot | None:
    """The downloaded files of a model of the hub; None if there are none. OSError if the cache cannot be
    read.
    """
    if not _NAME.fullmatch(name):
        return None
    folder = cache_folder(cache_dir) / f"models--{name.replace('/', '--')}"
    revision = revision or "main"
    if _GIT_SHA1.fullmatch(revision):
        commit, ref = revision, None
    else:
        ref = folder / "refs" / revision
        if ".." in ref.parts or not ref.is_file():
            return None
        commit = ref.read_text(encoding="ascii", errors="replace").strip()
    snapshot = folder / "snapshots" / commit
    return Snapshot(snapshot, ref) if _GIT_SHA1.fullmatch(commit) and snapshot.is_dir() else None


def folder_of(name: str, revision: str = "", cache_dir: str = "") -> Path | None:
    """A model's folder, or single file: its path, or where the hub's cache has it; None if it has not.
    OSError if it cannot be looked at.
    """
    path = Path(os.path.expanduser(name))
    if path.exists():
        return path
    snapshot = snapshot_of(name, revision, cache_dir)
    return None if snapshot is None else snapshot.folder


def is_as_downloaded(path: Path, sha256: str) -> bool:
    """Whether ``path`` is a file of the cache that nobody has touched since it was put there. ``sha256``: of
    what it holds. OSError if it cannot be looked at.
    """
    blob = _blob_of(path)
    if blob is None or (_SHA256.fullmatch(blob.name) and blob.name != sha256):
        return False
    # The link is made when its blob is complete. A copy of the cache has such links too: the times alone do
    # not say that a blob is what its name says.
    return blob.stat().st_ctime_ns <= path.lstat().st_mtime_ns


def is_snapshot(folder: Path) -> bool:
    """Whether ``folder`` is named as a revision in the hub's cache is, whose files do not change."""
    above = folder.parent
    return (
        _GIT_SHA1.fullmatch(folder.name) is not None
        and above.name == "snapshots"
        and above.parent.name.startswith("models--")
    )


def _blob_of(path: Path) -> Path | None:
    """``snapshots/COMMIT/.../file`` -> ``../../blobs/NAME``, of the same model; None for any other file."""
    if not path.is_symlink():
        return None
    blob = Path(os.path.normpath(path.parent / path.readlink()))
    parents = [parent for parent in path.parents if parent.name == "snapshots"]
    is_ours = bool(parents) and blob.parent == Path(os.path.normpath(parents[0].parent / "blobs"))
    return blob if is_ours and not blob.is_symlink() else None

"""The secret of a shared store: whoever has it can make the names of its records, and nobody else can."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path

from kvbm_core.errors import ConfigError

SETTING = "KVBM_REMOTE_SECRET_FILE"
MIN_BYTES = 16
MAX_BYTES = 4096
_REMEDY = "name a file that holds it, on all machines the same, made by: openssl rand -base64 32"


def read_private(setting: str, path: str, remedy: str, *, is_hidden: bool = False) -> bytes:
    """What is in a small file, but for white space around it; of more than MAX_BYTES the beginning.
    ConfigError; a pipe is refused, as nobody may ever write into it. ``is_hidden``: so is what others may
    read.
    """
    try:
        fd = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(setting, path, f"is not a file; {remedy}")
            if is_hidden and mode & 0o077:
                raise ConfigError(setting, path, f"others may read it; run: chmod 600 {path}")
            return file.read(MAX_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(setting, path, f"cannot be read: {error.strerror}; {remedy}") from None


class Secret:
    """Never shown: neither it nor a digest of it alone is in a log line, a ``repr`` or a file."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __repr__(self) -> str:
        return "Secret(...)"

    def digest(self, purpose: str, *data: bytes) -> bytes:
        """32 bytes (HMAC-SHA256) that nobody can make without it; others for another purpose or data."""
        fields = (purpose.encode(), *data)
        message = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
        return hmac.digest(self._content, message, "sha256")

    @classmethod
    def read(cls, path: str) -> Secret | None:
        """What is in the file, but for white space around it; None for an empty ``path``. ConfigError."""
        if not path:
            return None
        content = read_private(SETTING, path, _REMEDY)
        if not MIN_BYTES <= len(content) <= MAX_BYTES:
            size = f"holds {len(content)} bytes, not {MIN_BYTES} to {MAX_BYTES}"
            raise ConfigError(SETTING, path, f"{size}; {_REMEDY}")
        return cls(content)

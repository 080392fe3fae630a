"""Who an engine is to a server of a shared store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbm_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerLogin:
    """Who we are to a server, and whom we believe to be it. ``password_file``: holds it, but for white space
    around. ``ca_file``: a CA of one's own; else the system's. ``cert_file``: our certificate and its key,
    where the server asks for one.
    """

    username: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""

    def password(self) -> bytes:
        """What the file holds now. ConfigError."""
        if not self.password_file:
            return b""
        try:
            return Path(self.password_file).read_bytes().strip()
        except OSError as error:
            remedy = f"cannot be read: {error.strerror}; name a file that holds the password alone"
            raise ConfigError("KVBM_REMOTE_PASSWORD_FILE", self.password_file, remedy) from None

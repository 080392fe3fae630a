"""Who an engine is to a server of a shared store."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_core.errors import ConfigError
from kvbm_core.storage.remote.secret import MAX_BYTES, read_private


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
        setting, remedy = "KVBM_REMOTE_PASSWORD_FILE", "name a file that holds the password alone"
        content = read_private(setting, self.password_file, remedy)
        if len(content) > MAX_BYTES:
            raise ConfigError(setting, self.password_file, f"holds more than {MAX_BYTES} bytes; {remedy}")
        return content

"""An etcd of a test's or a benchmark's own: on a free port of loopback, or of an address that it is given.

Debian's `etcd`, installed or as deploy/setup_env.py unpacks it into the environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvbm_core.fleet.etcd import EtcdOptions, open_client
from tests.engines.certificates import Certificates
from tests.engines.own_server import OwnServer
from tests.engines.ports import HOST, free_port, listens


def find_etcd(name: str = "etcd") -> str | None:
    """The program, in this environment or on PATH."""
    places = f"{Path(sys.prefix) / 'etcd' / 'usr' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which(name, path=places)


class EtcdServer(OwnServer):
    """A context manager. ``certificates``: TLS, and only clients with one that their authority has signed.
    ``prefix``: of its command line, to run it elsewhere.
    """

    def __init__(
        self,
        folder: Path,
        certificates: Certificates | None = None,
        *,
        host: str = HOST,
        prefix: tuple[str, ...] = (),
    ) -> None:
        super().__init__(folder / "etcd" / "etcd.log")
        self.host = host
        self._folder = folder / "etcd"
        self._certificates = certificates
        self._prefix = prefix

    @property
    def url(self) -> str:
        """As in ETCD_ENDPOINTS."""
        return f"http{'s' if self._certificates else ''}://{self.host}:{self.port}"

    def options(self, **changes: Any) -> EtcdOptions:
        """A client's, with a short lease."""
        given: dict[str, Any] = {"lease_s": 2.0}
        if self._certificates is not None:
            given |= {"is_tls": True, "ca_file": str(self._certificates.authority)}
            given |= {"cert_file": str(self._certificates.certificate)}
            given |= {"key_file": str(self._certificates.key)}
        return EtcdOptions(((self.host, self.port),), **{**given, **changes})

    def client(self) -> Any:
        """etcd3's, of this server; the caller closes it."""
        return open_client(self.options(), 0)

    def names(self) -> list[str]:
        """Of all records, by a client of the test's own."""
        client = self.client()
        try:
            return [about.key.decode() for _, about in client.get_all(keys_only=True)]
        finally:
            client.close()

    def revisions(self) -> dict[str, int]:
        """Of all records by name, that at which each came to be."""
        client = self.client()
        try:
            return {about.key.decode(): about.create_revision for _, about in client.get_all(keys_only=True)}
        finally:
            client.close()

    def _command(self) -> list[str]:
        program = find_etcd()
        assert program is not None
        peers = f"http://{HOST}:{free_port()}"
        command = [*self._prefix, program, "--name", "test", "--data-dir", str(self._folder / "data")]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        command += ["--initial-cluster", f"test={peers}", "--unsafe-no-fsync"]
        if self._certificates is not None:
            authority, certificate, key, _ = map(str, self._certificates)
            command += ["--cert-file", certificate, "--key-file", key]
            command += ["--client-cert-auth", "--trusted-ca-file", authority]
        return command

    def _answers(self) -> bool:
        if self._prefix:  # out of our reach
            command = [*self._prefix, find_etcd("etcdctl") or "etcdctl", "--endpoints", self.url]
            return subprocess.run([*command, "endpoint", "health"], capture_output=True).returncode == 0
        if self.host == HOST and not listens(self.pid, self.port):
            return False
        try:
            client = self.client()
        except Exception:
            return False
        try:
            client.status()
            return True
        except Exception:
            return False
        finally:
            client.close()

    def lose_all(self) -> None:
        """What it has stored; while it is stopped."""
        assert self._process is None
        shutil.rmtree(self._folder / "data")

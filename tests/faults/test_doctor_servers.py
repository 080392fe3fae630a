"""``kvbm doctor`` finds what is wrong with etcd, NATS and shared stores: real servers, with wrong rights or
wrong passwords, or away; and nothing where all is well.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm_core.cli.doctor.check import Finding, Level
from kvbm_core.config import KvbmSettings
from kvbm_core.control.operators import new_operator_key
from kvbm_core.fleet.keys import new_keys
from tests.engines.etcd_server import EtcdServer, find_etcd
from tests.engines.nats_server import NatsServer
from tests.engines.object_servers import ACCESS_KEY, BUCKET, SECRET_KEY, MotoServer, SeaweedServer
from tests.engines.ports import HOST, free_port
from tests.engines.valkey_server import ValkeyServer
from tests.unit.doctor_bench import doctor, found, is_well, levels, look, mounted

ERROR, WARNING = Level.ERROR, Level.WARNING
OF_THE_MACHINE = {"shared-memory", "open-files", "huge-pages"}
"""What the machine of this test may lack."""
READER_KEY = "KVBMTESTREADERKEY"
READER = ("--user", "reader", "on", ">secret", "~*", "+@read", "+@connection", "+info")
"""A user of Valkey's who may only read."""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting from outside."""
    names = [name for name in os.environ if name.startswith("AWS_")]
    for variable in (*KvbmSettings.env_names().values(), *names):
        monkeypatch.delenv(variable, raising=False)


# ---------------------------------------------------------------- etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """With a root, one who may keep records of the fleet `mine`, and one who may do nothing."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        commands = [
            "user add root:secret",
            "user grant-role root root",
            "role add mine",
            "user add one:secret",
        ]
        commands += ["role grant-permission mine --prefix=true readwrite /kvbm/v1/mine/"]
        commands += ["user grant-role one mine", "user add nobody:secret", "auth enable"]
        for command in commands:
            program = [find_etcd("etcdctl") or "etcdctl", "--endpoints", server.url, *command.split()]
            subprocess.run(program, check=True, capture_output=True)
        yield server


def ask_etcd(
    monkeypatch: pytest.MonkeyPatch, url: str, user: str = "", password: str = "secret"
) -> list[Finding]:
    if user:
        monkeypatch.setenv("ETCD_AUTH_PASSWORD", password)
    return look("etcd", etcd_endpoints=url, etcd_auth_username=user, fleet="mine")


@pytest.mark.etcd
@pytest.mark.shows("ETCD_AUTH_USERNAME", "ETCD_AUTH_PASSWORD")
def test_etcd(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("etcd") == []
    assert is_well(ask_etcd(monkeypatch, etcd.url, "one"))
    found(ask_etcd(monkeypatch, etcd.url, "nobody"), ERROR, "permission denied", "prefix /kvbm/v1/mine/")
    found(ask_etcd(monkeypatch, etcd.url, "one", "wrong"), ERROR, "authentication", "ETCD_AUTH_PASSWORD")


@pytest.mark.etcd
def test_etcd_that_asks_for_a_name(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    found(ask_etcd(monkeypatch, etcd.url), ERROR, "user name is empty", "ETCD_AUTH_USERNAME")


@pytest.mark.etcd
def test_one_of_two_etcds_is_away(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = f"http://{HOST}:{free_port()}"
    findings = ask_etcd(monkeypatch, f"{etcd.url},{nobody}", "one")
    found(findings, ERROR, f"etcd at {nobody[7:]}", "start etcd there")
    assert findings[0].level is Level.OK


@pytest.mark.etcd
def test_an_etcd_that_does_not_answer(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd.freeze()
    try:
        found(ask_etcd(monkeypatch, etcd.url, "one"), ERROR, f"etcd at {HOST}:{etcd.port}")
    finally:
        etcd.thaw()


def test_etcd_on_another_machine_without_tls() -> None:
    found(
        look("etcd", etcd_endpoints="http://192.0.2.1:2379"), ERROR, "is not encrypted", "KVBM_FLEET_INSECURE"
    )


# ---------------------------------------------------------------- NATS


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """With one who may do what kvbm does, and one who may only listen, elsewhere."""
    rights = '{ publish: ["kvbm.v1.>", "_INBOX.>"], subscribe: ["kvbm.v1.>", "_INBOX.>"] }'
    users = [
        f"{{ user: one, password: secret, permissions: {rights} }}",
        '{ user: silent, password: secret, permissions: { publish: { deny: ">" }, subscribe: "kvbm.v1.>" } }',
        '{ user: deaf, password: secret, permissions: { publish: "kvbm.v1.>", subscribe: "other.>" } }',
    ]
    folder = tmp_path_factory.mktemp("nats")
    with NatsServer(folder, authorization=f"users: [ {', '.join(users)} ]") as server:
        yield server


def ask_nats(monkeypatch: pytest.MonkeyPatch, url: str, user: str, password: str = "secret") -> list[Finding]:
    monkeypatch.setenv("NATS_AUTH_PASSWORD", password)
    return look("nats", events="nats", nats_server=url, nats_username=user)


@pytest.mark.nats
def test_nats(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("nats", nats_server=nats.url) == []
    assert is_well(ask_nats(monkeypatch, nats.url, "one"))
    found(ask_nats(monkeypatch, nats.url, "one", "wrong"), ERROR, "uthorization", "NATS_AUTH_PASSWORD")


@pytest.mark.nats
@pytest.mark.parametrize(("user", "what"), [("silent", "publish"), ("deaf", "subscription")])
def test_nats_without_rights(user: str, what: str, nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = ask_nats(monkeypatch, nats.url, user)
    found(findings, ERROR, f"permissions violation for {what}", "kvbm.v1.default.>", "_INBOX.>")


@pytest.mark.nats
def test_nats_that_is_away_or_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = f"nats://{HOST}:{free_port()}"
    found(ask_nats(monkeypatch, nobody, "one"), ERROR, "start a NATS server there")
    found(ask_nats(monkeypatch, "nats://192.0.2.1", "one"), ERROR, "has no TLS")


# ---------------------------------------------------------------- shared stores


def ask_store(url: str, **more: object) -> list[Finding]:
    return look("stores", cpu_cache_gb=1, remote_url=url, remote_cache_gb=1, remote_deadline_s=3, **more)


def test_a_shared_directory(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'kv'}"
    found(ask_store(url), ERROR, "is not there", "mount or make it")
    (tmp_path / "kv").touch()
    found(ask_store(url), ERROR, "is no directory")
    (tmp_path / "kv").unlink()
    (tmp_path / "kv").mkdir()
    assert is_well(ask_store(url)) and list((tmp_path / "kv").iterdir()) == []
    (tmp_path / "kv").chmod(0o777)
    found(ask_store(url), WARNING, "others can write", "chmod go-w")


def test_a_shared_directory_that_is_read_only(tmp_path: Path) -> None:
    with mounted(tmp_path / "kv", "tmpfs", "ro") as folder:
        found(ask_store(f"file://{folder}"), ERROR, "Read-only file system", "the right to write")


@pytest.mark.valkey
def test_valkey(tmp_path: Path) -> None:
    arguments = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    with ValkeyServer(tmp_path, *arguments) as server:
        password = server.login().password_file
        assert is_well(ask_store(server.url, remote_password_file=password))
        wrong = server.login("wrong").password_file
        found(ask_store(server.url, remote_password_file=wrong), ERROR, "WRONGPASS", "REMOTE_PASSWORD_FILE")
        found(ask_store(server.url), ERROR, "NOAUTH", "KVBM_REMOTE_PASSWORD_FILE")
    found(ask_store(server.url), ERROR, "cannot write", "look whether the server runs")


@pytest.mark.valkey
def test_valkey_without_rights_and_without_a_limit(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path, *READER) as server:
        password = server.login().password_file
        given = {"remote_password_file": password}
        found(ask_store(server.url, **given), WARNING, "no limit of memory", "maxmemory")
        (reader := tmp_path / "reader").write_text("secret")
        given = {"remote_username": "reader", "remote_password_file": str(reader)}
        found(ask_store(server.url, **given), ERROR, "NOPERM", "docs/remote.md")


def test_a_mooncake_master_that_is_away() -> None:
    url = f"mooncake://{HOST}:{free_port()}"
    found(ask_store(url), ERROR, "refused", "start mooncake_master there")
    with socket.create_server((HOST, 0)) as master:
        assert is_well(ask_store(f"mooncake://{HOST}:{master.getsockname()[1]}"))


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A bucket with one who may do all, and one who may only read."""
    if missing := SeaweedServer.missing():
        pytest.skip(f"NOT RUN: a bucket: {missing}")

    class WithReader(SeaweedServer):
        def command(self) -> list[str]:
            command = super().command()
            path = self.folder / "s3.json"
            config = json.loads(path.read_text())
            key = {"accessKey": READER_KEY, "secretKey": SECRET_KEY}
            config["identities"].append({"name": "reader", "credentials": [key], "actions": ["Read", "List"]})
            path.write_text(json.dumps(config))
            return command

    server = WithReader(tmp_path_factory.mktemp("seaweed"))
    server.start()
    server.make_bucket()
    yield server
    server.stop()


@pytest.fixture
def ask_bucket(bucket: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    """With these keys."""

    def ask(name: str = BUCKET, key: str = ACCESS_KEY, secret: str = SECRET_KEY) -> list[Finding]:
        environ = bucket.client_environment | {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
        for variable, value in environ.items():
            monkeypatch.setenv(variable, value)
        return ask_store(f"s3://{name}/kv")

    return ask


def test_a_bucket(bucket: SeaweedServer, ask_bucket: Callable[..., list[Finding]]) -> None:
    assert is_well(ask_bucket())
    listed = bucket.admin().list_objects_v2(Bucket=BUCKET)
    assert not listed.get("Contents")
    found(ask_bucket(secret="wrong"), ERROR, "cannot write", "correct the credentials")
    found(ask_bucket(key=READER_KEY), ERROR, "cannot write", "docs/remote.md")


def test_a_bucket_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SeaweedFS makes it."""
    if missing := MotoServer.missing():
        pytest.skip(f"NOT RUN: a bucket that is not there: {missing}")
    server = MotoServer(tmp_path)
    server.start()
    try:
        for variable, value in server.client_environment.items():
            monkeypatch.setenv(variable, value)
        found(ask_store("s3://no-such-bucket"), ERROR, "cannot write", "make the bucket")
    finally:
        server.stop()


# ---------------------------------------------------------------- all is well


@pytest.mark.etcd
@pytest.mark.nats
@pytest.mark.valkey
@pytest.mark.vllm
def test_a_healthy_machine_has_no_faults(
    etcd: EtcdServer, nats: NatsServer, bucket: SeaweedServer, tmp_path: Path, short_path: Path
) -> None:
    public, secret = new_keys(tmp_path / "keys", "one")
    (tmp_path / "shared").mkdir(mode=0o700)
    (tmp_path / "secret").write_text("a secret of some length")
    (tmp_path / "model").mkdir()
    config = {
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]})
    )
    (tmp_path / "model" / "model.safetensors").touch()
    ports = [free_port() for _ in range(5)]
    with ValkeyServer(
        tmp_path, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru", password=""
    ) as valkey:
        environ = {
            "TMPDIR": str(short_path),
            "DYN_KVBM_CPU_CACHE_GB": "0.1",
            "DYN_KVBM_DISK_CACHE_GB": "0.2",
            "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path / "disk"),
            "KVBM_REMOTE_URL": f"{valkey.url} s3://{BUCKET}/kv",
            "KVBM_REMOTE_SECRET_FILE": str(tmp_path / "secret"),
            "KVBM_REMOTE_DEADLINE_S": "10",
            "KVBM_CURVE_KEY_FILE": str(secret),
            "KVBM_CURVE_ALLOWED": str(public),
            "ETCD_ENDPOINTS": etcd.url,
            "ETCD_AUTH_USERNAME": "one",
            "ETCD_AUTH_PASSWORD": "secret",
            "KVBM_FLEET": "mine",
            "NATS_SERVER": nats.url,
            "NATS_AUTH_USERNAME": "one",
            "NATS_AUTH_PASSWORD": "secret",
            "KVBM_EVENTS": "zmq,nats",
            "KVBM_EVENTS_ENDPOINT": f"tcp://{HOST}:{ports[0]}",
            "KVBM_EVENTS_REPLAY_ENDPOINT": f"tcp://{HOST}:{ports[1]}",
            "KVBM_CONTROL": "nats",
            "KVBM_CONTROL_OPERATORS": new_operator_key(tmp_path / "operator"),
            "KVBM_PEERS": "zmq",
            "KVBM_PEER_BIND": f"{HOST}:{ports[2]}",
            "DYN_KVBM_METRICS": "true",
            "DYN_KVBM_METRICS_PORT": str(ports[3]),
            "DYN_KVBM_LEADER_ZMQ_ACK_PORT": str(ports[4]),
            **bucket.client_environment,
        }
        status, answer, said = doctor("--engine", "vllm", "--model", str(tmp_path / "model"), **environ)
    bad = [one for one in answer["checks"] if one["level"] not in (None, "ok", "note")]
    bad = [one for one in bad if one["check"] not in OF_THE_MACHINE]
    assert not bad and status <= 1 and not said, bad
    idle = {name for name, level in levels(answer).items() if level is None}
    assert idle <= {"pinning", "gds", "nixl"}

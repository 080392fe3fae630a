"""URLs of servers: what they name, and that nothing secret in one is ever shown."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvbm_core.cli.main import app
from kvbm_core.config import KvbmSettings
from kvbm_core.config.server_url import ServerUrl, server_url
from kvbm_core.errors import ConfigError

WORD = "hunter2"


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis://kv.example", ServerUrl("redis", "kv.example", 6379)),
        ("valkey://10.0.0.7:6380/3", ServerUrl("valkey", "10.0.0.7", 6380, 3)),
        ("REDISS://kv.example/", ServerUrl("rediss", "kv.example", 6379)),
        ("valkeys://[fd00::7]:1/15", ServerUrl("valkeys", "fd00::7", 1, 15)),
        ("mooncake://master:50052", ServerUrl("mooncake", "master", 50052)),
        ("mooncake://master", ServerUrl("mooncake", "master", 50051)),
    ],
)
def test_what_a_url_names(url: str, named: ServerUrl) -> None:
    assert server_url(url) == named
    assert named.is_tls == (named.scheme in ("rediss", "valkeys"))


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{WORD}@kv.example:6379",
        f"redis://user:{WORD}@kv.example",
        f"rediss://user:a/b?{WORD}@kv.example",
        f"valkey://kv.example/0?password={WORD}",
        f"valkey://kv.example/0#{WORD}@",
        f"mooncake://{WORD}@master:1",
        "redis://",
        "redis://kv.example:x",
        "redis://kv.example:70000",
        "redis://kv.example/one",
        "redis://kv.example/-1",
        "mooncake://master:1/0",
    ],
)
def test_what_is_refused_is_a_line_without_what_may_be_secret(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBM_REMOTE_URL", url)
    with pytest.raises(ConfigError) as caught:
        KvbmSettings.from_env()
    assert str(caught.value).startswith("kvbm: KVBM_REMOTE_URL=")
    told = CliRunner().invoke(app, ["config"])
    assert told.exit_code == 2
    error: BaseException | None = caught.value
    texts = [told.output, told.stderr]
    while error is not None:
        texts += [str(error), repr(error)]
        error = error.__context__
    assert all(WORD not in text for text in texts), texts


def test_a_server_bounds_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_REMOTE_URL", "redis://kv.example")
    assert not KvbmSettings.from_env().warnings
    monkeypatch.setenv("KVBM_REMOTE_CACHE_GB", "500")
    (line,) = KvbmSettings.from_env().warnings
    assert (
        line
        == "kvbm: KVBM_REMOTE_CACHE_GB=500.0: is for a shared directory; the server's own settings bound it"
    )

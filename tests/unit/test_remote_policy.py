"""``kvbm remote policy``: what it prints for each kind of store, and that it asks nobody."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvbm_core.cli.main import app


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked."""

    def refuse(*_: object) -> None:
        raise AssertionError("a connection is made")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def policy(url: str, *more: str) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, ["remote", "policy", url, *more])


def document(url: str, *more: str) -> Any:
    """What is printed for a file."""
    told = policy(url, *more)
    assert told.exit_code == 0, told.output
    return json.loads(told.output)


@pytest.mark.parametrize(
    ("url", "prefix"),
    [("s3://kv", "kvbm2/"), ("s3://kv/", "kvbm2/"), ("S3://kv/team/a/", "team/a/kvbm2/")],
)
def test_the_rule_of_a_bucket_is_for_records_alone(url: str, prefix: str) -> None:
    (rule,) = document(url, "--only", "lifecycle", "--days", "30")["Rules"]
    assert (rule["Filter"], rule["Expiration"], rule["Status"]) == (
        {"Prefix": prefix},
        {"Days": 30},
        "Enabled",
    )
    records, bucket = document(url, "--only", "rights")["Statement"]
    assert records["Resource"] == f"arn:aws:s3:::kv/{prefix}*"
    assert set(records["Action"]) == {"s3:GetObject", "s3:PutObject", "s3:DeleteObject"}
    assert (bucket["Action"], bucket["Resource"]) == ("s3:ListBucket", "arn:aws:s3:::kv")
    whole = policy(url).output
    (again,) = re.findall(r"kvbm remote policy (\S+) --days 7 --only lifecycle", whole)
    assert document(again, "--only", "lifecycle") == document(url, "--only", "lifecycle")
    assert json.dumps(document(url, "--only", "lifecycle"), indent=2) in whole


@pytest.mark.parametrize(
    ("url", "at", "value"),
    [
        ("gs://kv-cache/team", ("rule", 0, "condition"), {"age": 7, "matchesPrefix": ["team/kvbm2/"]}),
        (
            "az://container/team",
            ("rules", 0, "definition", "filters", "prefixMatch"),
            ["container/team/kvbm2/"],
        ),
    ],
)
def test_other_clouds_rules(url: str, at: tuple[str | int, ...], value: object) -> None:
    found = document(url, "--only", "lifecycle")
    for step in at:
        found = found[step]
    assert found == value
    told = policy(url, "--only", "rights")
    assert told.exit_code == 2 and "give engines" in told.output


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://host:6379", "maxmemory-policy allkeys-lru"),
        ("valkeys://host", "~kvbm2/* -@all +set"),
        ("mooncake://host:50051", "mooncake_master --eviction_high_watermark_ratio"),
        ("file:///mnt/kv", "kvbm remote sweep file:///mnt/kv --max-gb"),
    ],
)
def test_what_bounds_other_stores(url: str, said: str) -> None:
    told = policy(url)
    assert told.exit_code == 0 and said in told.output
    assert policy(url, "--only", "lifecycle").exit_code == 2


@pytest.mark.parametrize(
    "more", [("nothing://x",), ("s3://",), ("s3://a b",), ("kv",), ("s3://kv", "--only", "all")], ids=str
)
def test_what_it_does_not_know_is_one_line(more: tuple[str, ...]) -> None:
    told = policy(*more)
    assert told.exit_code == 2 and told.output.count("\n") == 1


def test_a_rule_that_takes_what_is_used_is_refused() -> None:
    """Engines renew what they use once a day."""
    assert policy("s3://kv", "--days", "1").exit_code == 2

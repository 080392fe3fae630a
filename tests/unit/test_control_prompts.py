"""``kvbm pin``, ``quota`` and their like: what the command makes of its files, who may give such orders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvbm_core.cli.main import app
from kvbm_core.control.desk import NO_TENANTS, Desk, Report
from kvbm_core.control.messages import MAX_PROMPT_TOKENS, MAX_SALT_CHARS, Order, Verb, decode
from kvbm_core.control.messages import Result as Ended
from kvbm_core.control.operators import Operators, RefusedError
from kvbm_core.runtime.tenants import Chosen, QuotaRule, Tenant
from kvbm_core.testing.leader_bench import BenchDisk, LeaderBench
from tests.unit.control_bench import Cache, here, operator, taking_orders

__all__ = ["here"]

HERE = {"control": "socket", "instance": "one"}
PROMPT = list(range(100, 120))


def kvbm(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments], env={"NO_COLOR": "1", "COLUMNS": "200"})


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    content = {
        "tokens": json.dumps(PROMPT),
        "salt": "secret salt\n",
        "none": "{}",
        "answer": json.dumps({"count": len(PROMPT), "max_model_len": 4096, "tokens": PROMPT}),
        "huge": json.dumps([1] * (MAX_PROMPT_TOKENS + 1)),
        "negative": "[-1]",
        "empty": "[]",
        "no salt": "",
        "newline": "\n",
    }
    for name, text in content.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return {name: str(tmp_path / name) for name in content}


class Heard(Desk):
    """Says yes to all that it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[Order] = []
        self.nudge = self._answer

    def _answer(self) -> None:
        while (task := self.take()) is not None:
            self.orders.append(task.order)
            task.ended(task.order.verb and "done")  # type: ignore[arg-type]


def test_the_command_says_what_its_files_say(here: Path, files: dict[str, str]) -> None:
    desk = Heard()
    salted = ("--salt-file", files["salt"], "--all")
    with taking_orders(HERE, desk):
        assert kvbm("pin", "p", "--all", "--tokens", files["tokens"], "--ttl", "60").exit_code == 0
        assert kvbm("unpin", "p", "--instance", "one").exit_code == 0
        assert kvbm("lookup", "--tokens", files["tokens"], "--adapter", "a").exit_code == 0
        assert kvbm("quota", *salted, "--host-blocks", "5", "--disk-gb", "1").exit_code == 0
        assert kvbm("clear", *salted, "--tier", "disk").exit_code == 0
        assert kvbm("drain", "--all").exit_code == 0
        assert "kvbm lookup" in kvbm("lookup", "--tokens", files["answer"]).stdout.splitlines()[0]
        other = kvbm("clear", "--instance", "one.0")
        assert other.exit_code == 1 and "without the rank: --instance one" in other.stderr
    pin, unpin, lookup, quota, clear, drain, answer = desk.orders
    assert answer.tokens == lookup.tokens
    assert (pin.verb, pin.pin, pin.tokens, pin.ttl_s) == (Verb.PIN, "p", tuple(PROMPT), 60.0)
    assert (unpin.verb, unpin.pin, unpin.instance) == (Verb.UNPIN, "p", "one")
    assert (lookup.verb, lookup.adapter, lookup.salt) == (Verb.LOOKUP, "a", None)
    assert (quota.salt, quota.host_blocks, quota.disk_gb) == ("secret salt", 5, 1.0)
    assert (clear.verb, clear.tier, clear.salt) == (Verb.RESET, "disk", "secret salt")
    assert drain.verb is Verb.DRAIN


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["pin", "p", "--tokens", "TOKENS"], "--instance NAME or --all"),
        (["pin", "p", "--all"], "either --tokens FILE or --text FILE"),
        (["pin", "p", "--all", "--tokens", "none"], "no JSON list"),
        (["pin", "p", "--all", "--tokens", "negative"], "no JSON list"),
        (["pin", "p", "--all", "--tokens", "empty"], "has 0 tokens"),
        (["pin", "p", "--all", "--tokens", "huge"], "has 1,048,577 tokens, not 1 to 1,048,576"),
        (["pin", "p", "--all", "--tokens", "missing"], "No such file"),
        (["pin", "p", "--all", "--text", "salt"], "--text needs --model"),
        (["pin", "p", "--all", "--text", "salt", "--model", "nowhere"], "write the model's folder"),
        (["quota", "--all", "--host-blocks", "5"], "--salt-file FILE or --adapter NAME"),
        (["clear", "--all", "--salt-file", "no salt"], "is empty, and no salt is"),
        (["quota", "--all", "--salt-file", "newline", "--host-blocks", "5"], "is empty, and no salt is"),
        (["drain"], "kvbm drain: write --instance NAME or --all"),
        (["resume"], "kvbm resume: write --instance NAME or --all"),
        (["fleet", "drain"], "kvbm fleet drain: write --instance NAME or --all"),
        (["clear", "--all", "--tier", "remote"], "write all, host or disk"),
        (["clear"], "kvbm clear: write --instance NAME or --all"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], line: str, files: dict[str, str]) -> None:
    files["TOKENS"] = files["tokens"]
    result = kvbm(*(files.get(word, word) for word in arguments))
    assert result.exit_code == 2 and line in result.stderr and result.stderr.count("\n") == 1


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A model's folder, whose tokenizer puts a token before each prompt, as most do."""
    tokenizers = pytest.importorskip("tokenizers", reason="NOT RUN: --text; tokenizers is missing")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "?": 1, "you": 2, "are": 3}, "?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path / "model"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_a_text_is_read_by_the_models_tokenizer(here: Path, tokenizer: Path, tmp_path: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("you are caf\u00e9\nyou", encoding="utf-8")
    by_text = ("--all", "--text", str(text), "--model", str(tokenizer))
    desk = Heard()
    with taking_orders(HERE, desk):
        assert kvbm("pin", "p", *by_text).exit_code == 0 and kvbm("clear", *by_text).exit_code == 0
        lookup = kvbm("lookup", *by_text[1:])
        assert lookup.exit_code == 0
        assert [order.tokens for order in desk.orders] == [(0, 2, 3, 1, 2)] * 3
        text.write_bytes(b"\xff\xfe\xff")
        wrong = kvbm("pin", "p", *by_text)
        assert wrong.exit_code == 2 and "is no UTF-8 text" in wrong.stderr
        text.write_text("you", encoding="utf-8")
        (tokenizer / "tokenizer.json").write_text("{}", encoding="ascii")
        broken = kvbm("pin", "p", *by_text)
        assert broken.exit_code == 2 and broken.stderr.count("\n") == 1 and str(tokenizer) in broken.stderr
    assert len(desk.orders) == 3


def test_a_long_prompt_can_be_pinned_by_tokens_and_by_text(
    here: Path, tokenizer: Path, tmp_path: Path
) -> None:
    long = [100_000 + number % 900_000 for number in range(MAX_PROMPT_TOKENS)]
    tokens, text = tmp_path / "long.json", tmp_path / "long.txt"
    tokens.write_text(json.dumps(long), encoding="ascii")
    text.write_text("you are " * 60_000, encoding="ascii")
    desk = Heard()
    with taking_orders(HERE, desk):
        assert kvbm("pin", "p", "--all", "--tokens", str(tokens)).exit_code == 0
        assert kvbm("pin", "p", "--all", "--text", str(text), "--model", str(tokenizer)).exit_code == 0
    by_tokens, by_text = desk.orders
    assert list(by_tokens.tokens) == long and len(by_text.tokens) == 120_001


def test_a_prompt_whose_numbers_take_too_much_room_is_not_sent(here: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "wide.json"
    tokens.write_text(json.dumps([4_000_000_000] * MAX_PROMPT_TOKENS), encoding="ascii")
    desk = Heard()
    with taking_orders(HERE, desk):
        result = kvbm("pin", "p", "--all", "--tokens", str(tokens))
    assert result.exit_code == 2 and "more than 8,388,608" in result.stderr
    assert result.stderr.count("\n") == 1 and not desk.orders


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["quota", "--all", "--adapter", "a", "--host-gb", "inf"], "host_gb=inf: is no number"),
        (["quota", "--all", "--adapter", "a", "--disk-gb", "inf"], "disk_gb=inf: is no number"),
        (["quota", "--all", "--adapter", "a", "--host-gb", "1e10"], "$.host_gb"),
        (["quota", "--all", "--adapter", "a" * 300, "--host-blocks", "1"], "$.adapter"),
        (["pin", "p" * 300, "--all", "--tokens", "tokens"], "$.pin"),
        (["clear", "--all", "--salt-file", "long salt"], "$.salt"),
        (["clear", "--all", "--namespace", "n" * 300], "$.namespace"),
    ],
)
def test_what_an_engine_would_not_understand_is_not_sent(
    arguments: list[str], line: str, here: Path, files: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "long").write_text("s" * (MAX_SALT_CHARS + 1), encoding="ascii")
    files["long salt"] = str(tmp_path / "long")
    desk = Heard()
    with taking_orders(HERE, desk):
        result = kvbm(*(files.get(word, word) for word in arguments))
    assert result.exit_code == 2 and line in result.stderr and result.stderr.count("\n") == 1
    assert not desk.orders


def test_an_engine_that_tells_no_tokens_refuses_in_one_line(here: Path, files: dict[str, str]) -> None:
    cache = Cache()
    with taking_orders(HERE, cache.control):
        for words in (
            ["pin", "p", "--all", "--tokens", files["tokens"]],
            ["quota", "--all", "--adapter", "a", "--host-blocks", "1"],
            ["clear", "--all", "--salt-file", files["salt"]],
        ):
            result = kvbm(*words, "--json")
            assert result.exit_code == 1
            assert json.loads(result.stdout)["answers"][0]["text"] == NO_TENANTS
    assert not cache.resets


@pytest.mark.parametrize("verb", [Verb.PIN, Verb.UNPIN, Verb.QUOTA, Verb.LOOKUP, Verb.RESET])
def test_over_a_network_nobody_without_an_operators_key_is_heard(verb: Verb, tmp_path: Path) -> None:
    key, _ = operator(tmp_path)
    stranger, _ = operator(tmp_path, "stranger")
    operators = Operators(key.public, "f", "one", lambda: 0.0)
    order = Order(verb=verb, fleet="f", instance="one", tokens=tuple(PROMPT), salt="s", pin="p")
    with pytest.raises(RefusedError, match="the key is not in"):
        operators.check(stranger.sign(order))
    forged = json.loads(key.sign(order))
    forged["order"] = forged["order"].replace('"salt":"s"', '"salt":"t"')
    with pytest.raises(RefusedError, match="signature is wrong"):
        operators.check(json.dumps(forged).encode())


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [-1]},
        {"tokens": [2**32]},
        {"tokens": [0] * (MAX_PROMPT_TOKENS + 1)},
        {"ttl_s": 0},
        {"ttl_s": 1e12},
        {"host_blocks": -1},
        {"pin": "p" * 1000},
        {"salt": 5},
        {"salt": ""},
    ],
)
def test_what_is_out_of_bounds_is_no_order(wrong: dict[str, object]) -> None:
    assert decode(json.dumps({"verb": "pin", "tokens": [1], **wrong}).encode(), Order) is None
    assert decode(b'{"verb": "pin", "tokens": [1]}', Order) is not None


def test_a_quota_of_less_than_a_block_is_not_a_quota_of_nothing() -> None:
    bench = LeaderBench(disk=BenchDisk(block_bytes=1000))

    def ordered(**what: float) -> Report:
        end = bench.desk.submit(Order(verb=Verb.QUOTA, salt="s", **what))  # type: ignore[arg-type]
        bench.leader.poll()
        return end.result()

    for name in ("host_gb", "disk_gb"):
        answer = ordered(**{name: 9e-7})
        assert answer.result is Ended.REFUSED
        assert answer.text == "9e-07 GB are less than one block (1,000 bytes); 0 is for none at all"
    assert not bench.leader.tenants.num_quotas
    assert ordered(host_gb=0.0).text.startswith("at most 0 blocks in the host")
    assert ordered(host_gb=1e-6).text.startswith("at most 1 blocks in the host")


def test_the_more_exact_quota_counts_and_new_tenants_join() -> None:
    bench = LeaderBench()
    tenants, host = bench.leader.tenants, bench.leader.chain.host
    roots = [bytes([number]) * 32 for number in range(3)]
    assert tenants.set_rule(Chosen("a", None), QuotaRule(9, None))
    assert tenants.set_rule(Chosen(None, "s"), QuotaRule(5, None))
    numbers = [
        tenants.number(tenant, root)  # type: ignore[arg-type]
        for tenant, root in zip((Tenant("a"), Tenant("a", "s"), Tenant("b", "s")), roots, strict=True)
    ]
    quotas = [host._tenants.quota_of(number) for number in numbers]
    assert [quota and quota.limit_blocks for quota in quotas] == [9, 5, 5] and quotas[1] is quotas[2]
    tenants.set_rule(Chosen(None, "s"), None)
    assert [host._tenants.quota_of(number) is not None for number in numbers] == [True, True, False]
    host.check_integrity()

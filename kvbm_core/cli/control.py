"""``kvbm clear``, ``pin``, ``unpin``, ``lookup`` and ``quota``: orders to running engines."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbm_core.cli.console import fail
from kvbm_core.cli.fleet import All, Wait, ask_instances, give, show
from kvbm_core.cli.options import Instance, Json, Key, file_option
from kvbm_core.cli.report import BAD_USAGE_EXIT
from kvbm_core.control.messages import MAX_ORDER_BYTES, MAX_PROMPT_TOKENS, MAX_TTL_S, Order, Verb

Adapter = Annotated[str | None, typer.Option(help="Name of the LoRA adapter.")]
SaltFile = Annotated[
    Path | None, file_option("--salt-file", "A file with the salt: other users see command lines.")
]
_TOKENS = "A file with a JSON list of token numbers, or with the answer of an engine's /tokenize."
TokensFile = Annotated[Path | None, file_option("--tokens", _TOKENS)]
_TEXT = "A file with the prompt's text, as no chat template has changed it; needs --model."
TextFile = Annotated[Path | None, file_option("--text", _TEXT)]
Model = Annotated[str, typer.Option(help="Folder of the model whose tokenizer.json reads --text.")]
_MAX_TEXT_BYTES = 4 * MAX_ORDER_BYTES


def clear(
    *,
    instance: Instance = "",
    every: All = False,
    tier: Annotated[str, typer.Option(help="host, disk or all.")] = "all",
    namespace: Annotated[str, typer.Option(help="Only instances of this namespace.")] = "",
    adapter: Adapter = None,
    salt_file: SaltFile = None,
    tokens: TokensFile = None,
    text: TextFile = None,
    model: Model = "",
    key: Key = None,
    wait_s: Wait = 10.0,
    as_json: Json = False,
) -> None:
    """Forgets a tier; or in it what is of a salt, an adapter, or a prompt. What machines share stays.

    With --tokens or --text: that prompt's blocks, of this salt and adapter or of none. Loads end first.
    """
    if tier not in ("all", "host", "disk"):
        fail(f"kvbm clear: --tier {tier}: write all, host or disk", BAD_USAGE_EXIT)
    prompt = _prompt(tokens, text, model) if tokens or text else ()
    what = {"tier": tier, "namespace": namespace, **_whose(adapter, salt_file), "tokens": prompt}
    give(Verb.RESET, instance, every, key, wait_s, as_json=as_json, command="kvbm clear", **what)


def pin(
    name: Annotated[str, typer.Argument(help="Of the pin; one of the same name is replaced.")],
    *,
    instance: Instance = "",
    every: All = False,
    tokens: TokensFile = None,
    text: TextFile = None,
    model: Model = "",
    ttl_s: Annotated[
        float, typer.Option("--ttl", min=1.0, max=MAX_TTL_S, help="Seconds after which it ends.")
    ] = 3600.0,
    adapter: Adapter = None,
    salt_file: SaltFile = None,
    key: Key = None,
    wait_s: Wait = 10.0,
    as_json: Json = False,
) -> None:
    """Keeps a prompt's blocks from being evicted, for a while; those that come later too."""
    what = {"pin": name, "ttl_s": ttl_s, "tokens": _prompt(tokens, text, model)}
    what |= _whose(adapter, salt_file)
    give(Verb.PIN, instance, every, key, wait_s, as_json=as_json, command="kvbm pin", **what)


def unpin(
    name: Annotated[str, typer.Argument(help="Of the pin.")],
    *,
    instance: Instance = "",
    every: All = False,
    key: Key = None,
    wait_s: Wait = 10.0,
    as_json: Json = False,
) -> None:
    """Ends a pin."""
    give(Verb.UNPIN, instance, every, key, wait_s, as_json=as_json, command="kvbm unpin", pin=name)


def lookup(
    *,
    instance: Instance = "",
    tokens: TokensFile = None,
    text: TextFile = None,
    model: Model = "",
    adapter: Adapter = None,
    salt_file: SaltFile = None,
    key: Key = None,
    wait_s: Wait = 5.0,
    as_json: Json = False,
) -> None:
    """Where a prompt's blocks are now."""
    prompt = _prompt(tokens, text, model)
    whose = _whose(adapter, salt_file)
    order = Order(verb=Verb.LOOKUP, instance=instance, wait_s=wait_s, tokens=prompt, **whose)
    show(ask_instances(order, key, "kvbm lookup"), "kvbm lookup", instance, as_json=as_json)


def quota(
    *,
    instance: Instance = "",
    every: All = False,
    adapter: Adapter = None,
    salt_file: SaltFile = None,
    host_blocks: Annotated[int | None, typer.Option(min=0, help="At most so many in the host.")] = None,
    disk_blocks: Annotated[int | None, typer.Option(min=0, help="At most so many on disk.")] = None,
    host_gb: Annotated[float | None, typer.Option(min=0, help="In place of --host-blocks.")] = None,
    disk_gb: Annotated[float | None, typer.Option(min=0, help="In place of --disk-blocks.")] = None,
    key: Key = None,
    wait_s: Wait = 10.0,
    as_json: Json = False,
) -> None:
    """Limits what a salt or an adapter may have; without a size: no limit any more.

    Who has too much evicts blocks of its own.
    """
    whose = _whose(adapter, salt_file)
    if not any(value is not None for value in whose.values()):
        fail("kvbm quota: write --salt-file FILE or --adapter NAME", BAD_USAGE_EXIT)
    sizes = {
        "host_blocks": host_blocks,
        "disk_blocks": disk_blocks,
        "host_gb": host_gb,
        "disk_gb": disk_gb,
    }
    give(Verb.QUOTA, instance, every, key, wait_s, as_json=as_json, command="kvbm quota", **whose, **sizes)


COMMANDS = (clear, pin, unpin, lookup, quota)


def _whose(adapter: str | None, salt_file: Path | None) -> dict[str, Any]:
    salt = None if salt_file is None else _read(salt_file, "--salt-file").removesuffix("\n")
    if salt == "":
        fail(f"kvbm: --salt-file {salt_file}: is empty, and no salt is", BAD_USAGE_EXIT)
    return {"adapter": adapter, "salt": salt}


def _prompt(tokens: Path | None, text: Path | None, model: str) -> tuple[int, ...]:
    if (tokens is None) is (text is None):
        fail("kvbm: write either --tokens FILE or --text FILE", BAD_USAGE_EXIT)
    numbers = _numbers(tokens) if tokens is not None else _tokenized(text or Path(), model)
    if not 0 < len(numbers) <= MAX_PROMPT_TOKENS:
        fail(f"kvbm: the prompt has {len(numbers):,} tokens, not 1 to {MAX_PROMPT_TOKENS:,}", BAD_USAGE_EXIT)
    return numbers


def _numbers(file: Path) -> tuple[int, ...]:
    try:
        found = json.loads(_read(file, "--tokens"))
        if isinstance(found, dict):  # the answer of /tokenize
            found = found.get("tokens")
        return tuple(array("I", found if isinstance(found, list) else [found]))
    except (ValueError, TypeError, OverflowError, RecursionError):
        fail(f"kvbm: --tokens {file}: holds no JSON list of token numbers", BAD_USAGE_EXIT)


def _tokenized(file: Path, model: str) -> tuple[int, ...]:
    if not model:
        fail("kvbm: --text needs --model, whose tokenizer makes tokens of it", BAD_USAGE_EXIT)
    try:
        from tokenizers import Tokenizer  # of the engine's own environment
    except ImportError:
        fail("kvbm: --text needs the package tokenizers; or write --tokens FILE", BAD_USAGE_EXIT)
    path = Path(model).expanduser() / "tokenizer.json"
    if not path.is_file():
        fail(f"kvbm: --model {model}: {path} is not there; write the model's folder", BAD_USAGE_EXIT)
    try:
        made = Tokenizer.from_file(str(path))
    except Exception as error:  # whatever the package makes of such a file
        fail(f"kvbm: --model {model}: {type(error).__name__}: {error}", BAD_USAGE_EXIT)
    return tuple(made.encode(_read(file, "--text")).ids)


def _read(file: Path, option: str) -> str:
    try:
        with file.expanduser().open(encoding="utf-8") as opened:
            content = opened.read(_MAX_TEXT_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is no UTF-8 text"
        fail(f"kvbm: {option} {file}: {why}", BAD_USAGE_EXIT)
    if len(content) > _MAX_TEXT_BYTES:
        fail(f"kvbm: {option} {file}: is larger than {_MAX_TEXT_BYTES:,} characters", BAD_USAGE_EXIT)
    return content

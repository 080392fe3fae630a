"""Who may give orders over a network: operators, each with an nkey (Ed25519, as NATS has them).

An instance knows their public keys alone, so that nobody who breaks into one can give orders to the others.
What is signed names fleet and instance, a time and a number that is used once.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from kvbm_core.control.messages import Order, SignedOrder, decode
from kvbm_core.errors import ConfigError, KvbmError
from kvbm_core.storage.remote.secret import read_private

if TYPE_CHECKING:
    from nacl.signing import VerifyKey

OPERATORS = "KVBM_CONTROL_OPERATORS"
MAX_SKEW_S = 30.0
MAX_NONCES = 4096
MIN_NONCE = 16
_CONTEXT = b"kvbm control 1\n"
_MAKE_KEY = "make a key with: kvbm keys operator FILE"
_KEY_BYTES = 35  # kind, 32 bytes, checksum


class RefusedError(KvbmError):
    """An order that is not taken; one line."""


class Operators:
    """Tells orders of operators from all others. One thread. ConfigError, one line, for keys that are none.

    ``now_s``: the wall clock, in seconds since 1970.
    """

    def __init__(self, keys: str, fleet: str, instance: str, now_s: Callable[[], float] = time.time) -> None:
        self._keys = {key: _verifier(key) for key in keys.replace(",", " ").split()}
        if not self._keys:
            raise ConfigError(OPERATORS, "(unset)", f"nobody could give orders over NATS; {_MAKE_KEY}")
        self._fleet, self._instance = fleet, instance
        self._now_s = now_s
        self._began_s = now_s()
        self._nonces: dict[str, float] = {}

    def check(self, payload: bytes) -> Order:
        """The order, if an operator has given it to this instance just now, for the first time.
        RefusedError.
        """
        signed = decode(payload, SignedOrder)
        if signed is None:
            raise RefusedError("this is no signed order")
        key = self._keys.get(signed.key)
        if key is None:
            raise RefusedError(f"the key is not in {OPERATORS}")
        self._verify(key, signed)
        order = decode(signed.order.encode(errors="replace"), Order)
        if order is None:
            raise RefusedError("this version does not know such an order")
        if order.fleet != self._fleet or order.instance not in ("", self._instance):
            raise RefusedError("the order is for another instance")
        self._note(order)
        return order

    def _verify(self, key: VerifyKey, signed: SignedOrder) -> None:
        from nacl.exceptions import CryptoError

        try:
            signature = base64.b64decode(signed.signature, validate=True)
            key.verify(_CONTEXT + signed.order.encode(errors="replace"), signature)
        except (binascii.Error, CryptoError, ValueError, TypeError):
            raise RefusedError("the signature is wrong") from None

    def _note(self, order: Order) -> None:
        now_s = self._now_s()
        skew_s = order.time_s - now_s
        if not abs(skew_s) <= MAX_SKEW_S:
            side = "ahead of" if skew_s > 0 else "behind"
            line = f"its time is {abs(skew_s):.0f} s {side} this machine's clock; they must agree within "
            raise RefusedError(f"{line}{MAX_SKEW_S:.0f} s")
        if order.time_s <= self._began_s:  # what came before is not remembered
            raise RefusedError("it was given before this instance had started; give it again")
        if len(order.nonce) < MIN_NONCE or order.nonce in self._nonces:
            raise RefusedError("it was given before; give a new one")
        if len(self._nonces) >= MAX_NONCES:
            self._nonces = {nonce: end_s for nonce, end_s in self._nonces.items() if end_s > now_s}
            if len(self._nonces) >= MAX_NONCES:
                raise RefusedError("too many orders; wait a minute")
        self._nonces[order.nonce] = now_s + 2 * MAX_SKEW_S


def _nkeys(setting: str, value: object) -> ModuleType:
    """The package, which brings nacl along. ConfigError, one line, without it."""
    try:
        import nkeys
    except ImportError as error:
        raise ConfigError(setting, value, "needs the package nkeys: pip install 'nats-py[nkeys]'") from error
    module: ModuleType = nkeys
    return module


def _verifier(key: str) -> VerifyKey:
    nkeys = _nkeys(OPERATORS, "(set)")
    from nacl.signing import VerifyKey

    try:
        raw = base64.b32decode(key + "=" * (-len(key) % 8))
    except (binascii.Error, ValueError):
        raw = b""
    is_user = len(raw) == _KEY_BYTES and raw[0] == nkeys.PREFIX_BYTE_USER
    if not is_user or nkeys.crc16(raw[:-2]) != int.from_bytes(raw[-2:], "little"):
        raise ConfigError(OPERATORS, key[:80], f"is no public key of a user (U...); {_MAKE_KEY}")
    return VerifyKey(raw[1:-2])


# ---------------------------------------------------------------- the operator's side


class OperatorKey:
    """An operator's key pair, of a file with its seed. ConfigError, one line."""

    def __init__(self, path: Path) -> None:
        self._pair = _read_seed(path)
        self.public = str(self._pair.public_key.decode())

    def sign(self, order: Order) -> bytes:
        """What goes over the wire, with the time of now."""
        order = msgspec.structs.replace(order, time_s=time.time(), nonce=secrets.token_hex(16))
        text = msgspec.json.encode(order)
        signature = base64.b64encode(self._pair.sign(_CONTEXT + text)).decode()
        return msgspec.json.encode(SignedOrder(text.decode(), self.public, signature))


def _read_seed(path: Path) -> Any:
    nkeys = _nkeys("--key", path)
    content = read_private("--key", str(path), _MAKE_KEY, is_hidden=True)
    try:
        return nkeys.from_seed(bytearray(content))
    except Exception:  # whatever the package makes of what is no seed
        raise ConfigError("--key", path, f"holds no seed of an nkey; {_MAKE_KEY}") from None


def new_operator_key(path: Path) -> str:
    """Writes a new seed, for its owner alone; the public key. FileExistsError, OSError, ConfigError."""
    nkeys = _nkeys("kvbm keys operator", path)
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(seed + b"\n")
    return str(nkeys.from_seed(bytearray(seed)).public_key.decode())

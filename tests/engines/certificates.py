"""An authority of its own and a certificate for loopback, made anew for each test that wants them."""

from __future__ import annotations

import ipaddress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.engines.ports import HOST


class Certificates(NamedTuple):
    """Files in PEM. ``both``: certificate and key."""

    authority: Path
    certificate: Path
    key: Path
    both: Path


def make_certificates(folder: Path) -> Certificates:
    """For servers on loopback and their clients, good for a day."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = Certificates(*(folder / f"{name}.pem" for name in Certificates._fields))
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _signed(
        "tests' authority", authority_key, "tests' authority", authority_key, is_authority=True
    )
    certificate = _signed("tests", key, "tests' authority", authority_key, is_authority=False)
    paths.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    paths.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    paths.both.write_bytes(paths.certificate.read_bytes() + paths.key.read_bytes())
    return paths


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> x509.Certificate:
    now = datetime.now(timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address(HOST))
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

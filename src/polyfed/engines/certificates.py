"""Certificates for a federation of one's own: an authority, and one certificate a party.

The name of a party is the common name of its certificate; that is how others know who speaks. For
real use have your own authority sign them; these are for tests, examples and small consortia.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from polyfed.core.node import Name
from polyfed.errors import ConfigError


def make_certificates(
    folder: Path,
    names: Iterable[Name],
    *,
    hosts: Iterable[str] = ("localhost", "127.0.0.1"),
    days: int = 365,
) -> None:
    """Write ca.pem, ca.key and, for every name, NAME.pem and NAME.key.

    Args:
        folder: where to.
        names: of the parties.
        hosts: under which the parties are reached; a certificate holds for these.
        days: until they expire.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError as error:
        raise ConfigError("certificates need: pip install 'polyfed[peer]'.") from error

    now = datetime.datetime.now(datetime.timezone.utc)
    folder.mkdir(parents=True, exist_ok=True)

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def begun(name: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named("polyfed authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=days))
        )

    def write(name: str, key: ec.EllipticCurvePrivateKey, made: x509.Certificate) -> None:
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        path = folder / f"{name}.key"
        path.touch(mode=0o600)
        path.write_bytes(private)
        (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))

    authority = ec.generate_private_key(ec.SECP256R1())
    root = begun("polyfed authority", authority).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    write("ca", authority, root.sign(authority, hashes.SHA256()))
    reached = x509.SubjectAlternativeName([_host(host) for host in hosts])
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        leaf = begun(name, key).add_extension(reached, critical=False)
        leaf = leaf.add_extension(uses, critical=False)
        write(name, key, leaf.sign(authority, hashes.SHA256()))


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)

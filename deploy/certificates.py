"""An authority of one installation's own, and the certificates that it signs for its servers and their clients.

``python -m deploy.certificates FOLDER kafka=1000 postgres=999`` makes what one machine needs: ``FOLDER/ca`` holds the
authority's certificate for everybody to trust, ``FOLDER/kafka`` that of the server of this name, for the user of this
number alone. What is whole already stays as it is. The authority's own key is on no disk, so nothing can be added:
where something is missing everything is made anew, and whoever trusted the old one has to be started anew.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from deploy.local.process import write_atomically

HOSTS = ("127.0.0.1", "localhost")
LIFE = timedelta(days=1)
"""Validity of a trial's certificates."""
LASTING = timedelta(days=3650)
"""Validity of an installation's certificates, which nothing renews: docs/security.md says how to replace them."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files in PEM: the key is PKCS 8, without a password, for its owner's eyes alone."""

    certificate: Path
    key: Path

    @classmethod
    def of(cls, name: str, folder: Path) -> Certificate:
        return cls(folder / f"{name}.crt", folder / f"{name}.key")

    @property
    def both(self) -> Path:
        """Key and certificate in one file, as Kafka wants its key store."""
        return self.key.with_suffix(".both.pem")


class Authority:
    """Signs what it is asked to. ``ca`` is what others have to trust; its own key is on no disk."""

    def __init__(self, folder: Path, name: str = "Penstock's local authority", life: timedelta = LIFE) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._life = folder, life
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._public = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        now = datetime.now(UTC)
        signed = (
            _builder(self._name, self._name, self._key, now - timedelta(minutes=5), now + life)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(self._public, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = folder / "ca.crt"
        write_atomically(self.ca, _pem(signed))

    def issue(
        self, name: str, *, hosts: Sequence[str] = HOSTS, expired: bool = False, folder: Path | None = None
    ) -> Certificate:
        """A certificate whose common name is ``name``, for a server of these hosts or a client, in the authority's
        folder if no other is named."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        until = now - timedelta(hours=1) if expired else now + self._life
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signed = (
            _builder(subject, self._name, key, until - self._life - timedelta(minutes=5), until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._public), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        made = Certificate.of(name, folder or self._folder)
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
        write_atomically(made.certificate, _pem(signed))
        write_atomically(made.key, secret, mode=0o600)
        write_atomically(made.both, secret + _pem(signed), mode=0o600)
        return made


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, since: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(until)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def provide(folder: Path, owners: Mapping[str, int]) -> bool:
    """Create missing certificates. owners: by server, the number of its user. Returns False if none was missing."""
    if (folder / "ca" / "ca.crt").exists() and all(_whole(folder / name, name, owners[name]) for name in owners):
        return False
    authority = Authority(folder / "ca", "Penstock's own authority", LASTING)
    for name, owner in owners.items():
        place = folder / name
        place.mkdir(exist_ok=True)
        made = authority.issue(name, hosts=(name, *HOSTS), folder=place)
        write_atomically(place / "ca.crt", authority.ca.read_text())
        for file in (made.certificate, made.key, made.both):
            os.chown(file, owner, owner)
    return True


def _whole(place: Path, name: str, owner: int) -> bool:
    """Everything is there, and its server can read it: whoever was interrupted, or may not give files away, has left
    keys that cannot be."""
    made = Certificate.of(name, place)
    files = (made.certificate, made.key, made.both)
    return (place / "ca.crt").exists() and all(file.exists() and file.stat().st_uid == owner for file in files)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        folder, *servers = arguments
        owners = {name: int(owner) for name, _, owner in (server.partition("=") for server in servers)}
    except ValueError:
        typer.echo("usage: python -m deploy.certificates FOLDER SERVER=USER_NUMBER...", err=True)
        return 2
    made = provide(Path(folder), owners)
    typer.echo("certificates were made: start whatever runs anew" if made else "certificates: there already")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

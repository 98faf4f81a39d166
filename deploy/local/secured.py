"""The same three servers with everything that a company switches on: TLS with certificates that are verified, a login
for everybody, and no right that was not given.

For trying Penstock against them (tests/e2e/test_secured*.py). Postgres takes TLS and SCRAM alone, and of its owner a
certificate too; Kafka takes SASL over TLS (SCRAM and PLAIN), or TLS with a client's certificate, and asks its ACLs;
Elasticsearch has its security module on, and wants a client's certificate of everybody. The users that it starts with
stand in files; others, and API keys, can be made by its API.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import logging
import secrets
import shutil
import ssl
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psycopg
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from psycopg.conninfo import make_conninfo

from deploy.certificates import Authority, Certificate
from deploy.local import elasticsearch_users, postgres_tls
from deploy.local.elasticsearch import Elasticsearch
from deploy.local.kafka import Kafka
from deploy.local.postgres import DATABASE, USER, Postgres, password_of
from deploy.local.process import write_atomically
from deploy.local.service import HOST, LocalSettings, Place, Server, own_file, own_folder
from deploy.local.stack import Stack

IMAGE = Path(__file__).parents[1] / "image"
ROLES = Path(__file__).parents[1] / "roles" / "elasticsearch"
ADMIN = "admin"
"""May do everything in Kafka and Elasticsearch; Postgres's is ``postgres``."""
OWNER = "penstock_migrate"
"""Whom Postgres believes only with a certificate of that name."""


@dataclass(frozen=True, slots=True)
class Login:
    password: str
    certificate: Certificate


class Secured:
    """The stack of one state folder. ``logins``: who may log in besides the administrators, and as which role of
    deploy/roles/elasticsearch; in Postgres and Kafka they have no right yet."""

    def __init__(self, home: Path, logins: Mapping[str, str | None]) -> None:
        self.roles = logins
        self.authority = Authority(home / "certificates")
        self.logins = {name: Login(secrets.token_hex(16), self.authority.issue(name)) for name in (ADMIN, *logins)}
        self.home = home
        servers: tuple[Server, ...] = (_Postgres(self.authority), _Kafka(self), _Elasticsearch(self))
        self.stack = Stack(home, die_with_parent=True, servers={server.name: server for server in servers})

    def postgres(self, **more: str) -> str:
        """A conninfo for the superuser's connection; ``more`` changes it."""
        dsn = self.stack.endpoints()["postgres"]["dsn"]
        return make_conninfo(dsn, **{"user": USER, "password": password_of(Place(self.home, "postgres")), **more})

    def context(self, name: str) -> ssl.SSLContext:
        """The TLS context of a client with this login: it trusts the authority and shows the login's certificate."""
        return _context(self.authority, self.logins[name].certificate)


def _context(authority: Authority, shown: Certificate) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.load_cert_chain(shown.certificate, shown.key)
    return context


def _install(authority: Authority, place: Place) -> dict[str, Path]:
    """A new certificate for this server, and the authority's, where only the server's user reads the key."""
    own_folder(place.config, mode=0o700)
    made = authority.issue(place.name)
    files = {"ca": authority.ca, "certificate": made.certificate, "key": made.key, "both": made.both}
    installed = {what: place.config / file.name for what, file in files.items()}
    for what, file in files.items():
        shutil.copy(file, installed[what])
        own_file(installed[what])
    return installed


def compose_kafka(file: str, place: Place) -> dict[str, str]:
    """A file of deploy/image/kafka, its secrets and certificates where this server has them."""
    text = (IMAGE / "kafka" / file).read_text()
    for there in ("/run/secrets", "/etc/kafka/certificate"):
        text = text.replace(there, str(place.config))
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


class _Postgres(Postgres):
    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    def binaries(self) -> Path:
        return postgres_tls.require()

    def more_settings(self, place: Place) -> dict[str, object]:
        files = _install(self._authority, place)
        rules = place.config / "pg_hba.conf"
        write_atomically(
            rules,
            f"hostssl all {OWNER} {HOST}/32 scram-sha-256 clientcert=verify-full\n"
            f"hostssl all all {HOST}/32 scram-sha-256\n",
        )
        return {
            "hba_file": f"'{rules}'",
            "ssl": "on",
            "ssl_cert_file": f"'{files['certificate']}'",
            "ssl_key_file": f"'{files['key']}'",
            "ssl_ca_file": f"'{files['ca']}'",
            "ssl_min_protocol_version": "'TLSv1.2'",
        }

    def ready(self, address: str, place: Place) -> bool:
        return super().ready(make_conninfo(address, user=USER, password=password_of(place)), place)

    def complete(self, place: Place, port: int) -> None:
        admin = make_conninfo(self.url(place, port), user=USER, password=password_of(place), dbname="postgres")
        with psycopg.connect(admin, autocommit=True) as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone() is None:
                connection.execute(f'CREATE DATABASE "{DATABASE}"')

    def url(self, place: Place, port: int) -> str:
        return f"postgresql://{HOST}:{port}/{DATABASE}?sslmode=verify-full&sslrootcert={self._authority.ca}"


class _Kafka(Kafka):
    """Kafka with the settings of docker-compose.yml at other addresses, and one more listener, which requires
    certificates."""

    def __init__(self, secured: Secured) -> None:
        self._secured = secured

    def ports(self) -> tuple[str, ...]:
        return (*super().ports(), "kafka-certified")

    def more_properties(self, place: Place, ports: Mapping[str, int]) -> dict[str, object]:
        _install(self._secured.authority, place)
        write_atomically(place.config / "kafka_admin", self._secured.logins[ADMIN].password, mode=0o600)
        own_file(place.config / "kafka_admin")
        certified = f"CERTIFIED://{HOST}:{ports['kafka-certified']}"
        clients, controller = f"{HOST}:{ports['kafka']}", f"{HOST}:{ports['kafka-controller']}"
        return {
            **compose_kafka("server.properties", place),
            "controller.quorum.voters": f"1@{controller}",
            "listeners": f"CLIENTS://{clients},{certified},CONTROLLER://{controller}",
            "advertised.listeners": f"CLIENTS://{clients},{certified}",
            "listener.security.protocol.map": "CLIENTS:SASL_SSL,CERTIFIED:SSL,CONTROLLER:SASL_SSL",
            "listener.name.certified.ssl.client.auth": "required",
            "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/",
            "log.dirs": place.data,
        }

    def ready(self, address: str, place: Place) -> bool:
        return asyncio.run(self._lists_itself(address))

    async def _lists_itself(self, address: str) -> bool:
        quiet, level = logging.getLogger("aiokafka"), logging.getLogger("aiokafka").level
        quiet.setLevel(logging.CRITICAL)  # it does not listen yet: that is what is asked
        admin = AIOKafkaAdminClient(
            bootstrap_servers=address,
            request_timeout_ms=2000,
            security_protocol="SASL_SSL",
            sasl_mechanism="PLAIN",
            sasl_plain_username=ADMIN,
            sasl_plain_password=self._secured.logins[ADMIN].password,
            ssl_context=self._secured.context(ADMIN),
        )
        try:
            async with asyncio.timeout(3):
                await admin.start()
                return bool((await admin.describe_cluster())["brokers"])
        except (KafkaError, TimeoutError, OSError):
            return False
        finally:
            await admin.close()
            quiet.setLevel(level)

    def endpoint(self, place: Place, port: int) -> dict[str, str]:
        return {**super().endpoint(place, port), "security_protocol": "SASL_SSL"}


class _Elasticsearch(Elasticsearch):
    def __init__(self, secured: Secured) -> None:
        self._secured = secured

    def distribution(self) -> Path:
        return elasticsearch_users.require()

    def prepare(self, place: Place, ports: Mapping[str, int], settings: LocalSettings) -> None:
        super().prepare(place, ports, settings)
        held = {"superuser": [ADMIN]}
        for login, role in self._secured.roles.items():
            if role is not None:
                held.setdefault(role, []).append(login)
        users = [login for logins in held.values() for login in logins]
        roles = {file.stem: json.loads(file.read_text()) for file in sorted(ROLES.glob("*.json"))}
        for name, text in {
            "users": "".join(f"{login}:{_pbkdf2(self._secured.logins[login].password)}\n" for login in users),
            "users_roles": "".join(f"{role}:{','.join(logins)}\n" for role, logins in held.items()),
            "roles.yml": "".join(f"{name}: {json.dumps(role)}\n" for name, role in roles.items()),
        }.items():
            write_atomically(place.config / name, text, mode=0o600)
            own_file(place.config / name)

    def more_settings(self, place: Place) -> dict[str, object]:
        files = _install(self._secured.authority, place)
        shown = {
            "enabled": True,
            "certificate": files["certificate"].name,
            "key": files["key"].name,
            "certificate_authorities": [files["ca"].name],
            "client_authentication": "required",
        }
        return {
            "xpack.security.enabled": True,
            "xpack.security.enrollment.enabled": False,
            **{f"xpack.security.http.ssl.{name}": value for name, value in shown.items()},
            **{f"xpack.security.transport.ssl.{name}": value for name, value in shown.items()},
        }

    def connection(self, host: str) -> http.client.HTTPConnection:
        return http.client.HTTPSConnection(host, timeout=2, context=self._secured.context(ADMIN))

    def login(self) -> dict[str, str]:
        login = b64encode(f"{ADMIN}:{self._secured.logins[ADMIN].password}".encode()).decode()
        return {"authorization": f"Basic {login}"}

    def url(self, place: Place, port: int) -> str:
        return f"https://{HOST}:{port}"


def _pbkdf2(password: str) -> str:
    """A password in the form that Elasticsearch stores: PBKDF2 with HMAC-SHA-512, 10,000 rounds, a salt and a hash of
    32 bytes."""
    salt = secrets.token_bytes(32)
    hashed = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, 10_000, 32)
    return f"{{PBKDF2}}10000${b64encode(salt).decode()}${b64encode(hashed).decode()}"

"""The options of a source that reads an object store."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from connectors.base import ReadersOptions
from connectors.folder.patterns import selects

SECRETS = ("key", "secret", "token", "password", "passphrase", "account_key", "sas_token", "connection_string")
"""Secret arguments of fsspec's file systems, which are options of the same names."""


class ObjectsOptions(ReadersOptions):
    """acl_tags and required_tags hold for every object for which no sidecar file says otherwise."""

    url: str
    """Address of the folder whose objects are read: ``s3://bucket/prefix``, ``gs://…``, ``abfs://…``, ``sftp://host/path``,
    or another one that fsspec knows."""
    settings: Mapping[str, Any] = {}
    """Arguments of fsspec's file system that are not secret, such as ``endpoint_url`` for S3, or ``username``,
    ``key_filename`` and ``known_hosts`` for SFTP."""
    key: SecretStr | None = None
    """S3: the access key's id."""
    secret: SecretStr | None = None
    """S3: the secret access key."""
    token: SecretStr | None = None
    """S3: the session token; Google Cloud Storage: the path of a service account's key."""
    password: SecretStr | None = None
    """SFTP: the user's password. A key is named in settings: ``key_filename``."""
    passphrase: SecretStr | None = None
    """SFTP: the passphrase of the private key."""
    account_key: SecretStr | None = None
    """Azure: the storage account's key."""
    sas_token: SecretStr | None = None
    """Azure: a token of a shared access signature."""
    connection_string: SecretStr | None = None
    """Azure: a connection string."""
    include: tuple[str, ...] = ()
    """Patterns of paths below ``url`` (``docs/**``, ``*.pdf``); empty: everything that is not excluded."""
    exclude: tuple[str, ...] = ()
    """Patterns of objects that are not read."""
    sidecars: bool = False
    """Whether files called ``.penstock.toml`` in the store say who may read their folder, as those of the kind
    ``folder`` do. Whoever may write them decides who may read."""
    max_file_bytes: int = Field(50_000_000, ge=1)
    """Largest object that is read, in bytes."""
    source_url: str | None = None
    """Address at which a person opens an object, with ``{path}``."""

    @field_validator("url")
    @classmethod
    def _is_one_address(cls, url: str) -> str:
        protocol, separator, path = url.partition("://")
        if not separator or not path or not protocol.isalnum() or "::" in url:
            raise ValueError("write an address such as s3://bucket/prefix")
        if protocol in ("http", "https"):
            raise ValueError("a web server has no listing: write the address of an object store")
        return url.rstrip("/")

    @field_validator("source_url")
    @classmethod
    def _has_a_path(cls, template: str | None) -> str | None:
        if template is None:
            return None
        fields = [name for _, name, *_ in string.Formatter().parse(template) if name is not None]
        if fields != ["path"] or not template.startswith(("https://", "http://")):
            raise ValueError("write an https address with {path}")
        return template

    @model_validator(mode="after")
    def _has_no_secret_in_settings(self) -> Self:
        if secrets := sorted(set(SECRETS) & set(self.settings)):
            raise ValueError(
                f"settings.{secrets[0]} is a secret: it is the option {secrets[0]}, set in the environment"
            )
        return self

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of fsspec's file system, with secrets."""
        values = {name: getattr(self, name) for name in SECRETS}
        return {**self.settings, **{name: value.get_secret_value() for name, value in values.items() if value}}

    def selects(self, path: str) -> bool:
        return selects(path, self.include, self.exclude)

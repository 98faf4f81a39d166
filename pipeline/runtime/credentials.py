"""Secrets from files, and a connection string of Postgres with its login."""

from __future__ import annotations

import os
import re
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SecretsSettingsSource, SettingsError

from pipeline.core.errors import Misconfigured

SECRETS_DIR = "PENSTOCK_SECRETS_DIR"
MAX_KEY_LIFETIME = timedelta(days=400)
"""An API key that nobody replaces ends after so long at the latest: a year, and time to notice."""


def _start_of_day(value: object) -> object:
    if isinstance(value, date) and not isinstance(value, datetime):
        return datetime.combine(value, time(), UTC)
    return value


def _within_lifetime(expires: datetime) -> datetime:
    if expires > datetime.now(UTC) + MAX_KEY_LIFETIME:
        raise ValueError(f"is more than {MAX_KEY_LIFETIME.days} days ahead")
    return expires


KeyExpiry = Annotated[AwareDatetime, BeforeValidator(_start_of_day), AfterValidator(_within_lifetime)]
"""When an API key ends: a date (its beginning, UTC) or a time with its offset, at most MAX_KEY_LIFETIME ahead when it
is read."""


class SecretFilesSource(SecretsSettingsSource):
    """A file for each secret, named as its variable would be (in any case), as Kubernetes and Docker mount them."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls, secrets_dir=os.environ.get(SECRETS_DIR) or None)

    def __call__(self) -> dict[str, Any]:
        if self.secrets_dir is None:
            return {}
        try:
            os.listdir(str(self.secrets_dir))  # pydantic's own would only warn
            return super().__call__()
        except (OSError, SettingsError) as error:
            if field := re.search(r'parsing value for field "(\w+)"', str(error)):
                name = f"{self.settings_cls.model_config.get('env_prefix', '')}{field[1]}".upper()
                raise Misconfigured(f"{SECRETS_DIR}: the file {name} holds no JSON; give it as JSON") from error
            why = error.strerror if isinstance(error, OSError) else "a file in it leads out of it, or cannot be read"
            raise Misconfigured(f"{SECRETS_DIR} names {self.secrets_dir}: {why}; mount it, or unset it") from error

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        if self.settings_cls.model_config.get("env_prefix") == "PENSTOCK_":
            return None, field_name, False  # parts and no secrets: a file `penstock_canary` is somebody's password
        return super().get_field_value(field, field_name)


def environment() -> dict[str, str]:
    """The variables of the environment and of secret files, for names that no part of the settings knows (a
    connector's own). The environment wins. Raises Misconfigured."""
    try:
        secrets = {name: file.read_text("utf-8").strip() for name, file in _secret_files().items()}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(error) from error
    return secrets | os.environ


def variable_names() -> set[str]:
    """The names of these variables. Reads no file: one may be for another process alone. Raises Misconfigured."""
    try:
        return {*_secret_files(), *os.environ}
    except OSError as error:
        raise _unreadable(error) from error


def _secret_files() -> dict[str, Path]:
    folder = os.environ.get(SECRETS_DIR)
    files = list(Path(folder).iterdir()) if folder else []
    return {file.name.upper(): file for file in files if file.name.upper().startswith("PENSTOCK_") and file.is_file()}


def _unreadable(error: OSError | UnicodeDecodeError) -> Misconfigured:
    why = error.strerror if isinstance(error, OSError) else "a file in it is not UTF-8"
    return Misconfigured(f"{SECRETS_DIR} names {os.environ.get(SECRETS_DIR)}: {why}; mount it, or unset it")


def whole_dsn(dsn: SecretStr, username: str | None, password: SecretStr | None) -> SecretStr:
    """The connection string with the login in it, if one is given. Raises ValueError, which does not quote it."""
    from psycopg import ProgrammingError  # here: processes that need only another part do not import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    try:
        parts = conninfo_to_dict(dsn.get_secret_value())
    except ProgrammingError as error:
        raise ValueError("DSN is not a connection string: give postgresql://HOST/DATABASE?sslmode=…") from error
    if username is None and password is None:
        return dsn
    if username is not None:
        parts["user"] = username
    if password is not None:
        parts["password"] = password.get_secret_value()
    return SecretStr(make_conninfo("", **parts))

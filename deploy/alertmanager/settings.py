"""Where notifications are sent: the variables ``PENSTOCK_ALERTING_…``, or files of these names."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from pipeline.runtime.settings import Part, explained


class AlertingSettings(Part):
    """Each severity has a webhook, mail, both or neither. Without either, its alerts are only shown."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_ALERTING_", frozen=True, extra="forbid")

    page_webhook_url: SecretStr | None = None
    """Receives what a person is needed for at once, as Alertmanager's JSON. It is a secret: most services put a key
    into it."""
    ticket_webhook_url: SecretStr | None = None
    """Receives what can wait for working hours."""
    page_mail_to: str | None = None
    """Addresses that receive the same by mail, separated by commas."""
    ticket_mail_to: str | None = None
    """Addresses that receive tickets by mail, separated by commas."""
    mail_from: str | None = None
    """The sender's address."""
    smtp_server: str | None = None
    """``HOST:PORT``. Both mail settings above need it and ``mail_from``."""
    smtp_username: str | None = None
    """The login at that server."""
    smtp_password: SecretStr | None = None
    """The password of that login."""
    smtp_require_tls: bool = True
    """Refuse to send mail to a server that does not offer STARTTLS."""

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: Any, field: ValidationInfo) -> Any:
        """Treat an empty value as the default: a file for a secret may be empty."""
        if isinstance(value, str) and not value.strip():
            return cls.model_fields[str(field.field_name)].default
        return value

    @field_validator("page_webhook_url", "ticket_webhook_url")
    @classmethod
    def _is_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            parts = urlsplit(value.get_secret_value())
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("is no http or https address")
        return value

    @field_validator("smtp_server")
    @classmethod
    def _has_port(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^\s:]+:\d+|\[[0-9A-Fa-f:]+\]:\d+", value):
            raise ValueError("has to be HOST:PORT")
        return value

    @model_validator(mode="after")
    def _mail_is_complete(self) -> AlertingSettings:
        if (self.page_mail_to or self.ticket_mail_to) and not (self.smtp_server and self.mail_from):
            raise ValueError("mail needs PENSTOCK_ALERTING_SMTP_SERVER and PENSTOCK_ALERTING_MAIL_FROM")
        if (self.smtp_username is None) != (self.smtp_password is None):
            raise ValueError("PENSTOCK_ALERTING_SMTP_USERNAME and _SMTP_PASSWORD belong together")
        return self


def load() -> AlertingSettings:
    """Return the settings as they are now. Raises Misconfigured with one line that names the variable."""
    try:
        return AlertingSettings()
    except ValidationError as error:
        raise explained(error) from error

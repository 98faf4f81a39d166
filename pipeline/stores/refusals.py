"""Why Postgres does not let us in."""

from __future__ import annotations

import re

_REFUSALS = (
    (r"certificate verify failed",
     "its certificate is not trusted, or has expired: let sslrootcert in PENSTOCK_POSTGRES_DSN name the authority that"
     " signed it"),
    (r"server certificate for .* does not match host name",
     "its certificate is another host's: put the name that it was made for into PENSTOCK_POSTGRES_DSN"),
    (r"root certificate file .* does not exist", "sslrootcert in PENSTOCK_POSTGRES_DSN names a file that is not there"),
    (r"could not (load|read|open|stat).*(certificate|private key)|private key file .* (has|must)"
     r"|certificate does not match private key|certificate present, but not private key",
     "sslcert or sslkey in PENSTOCK_POSTGRES_DSN cannot be used: both in PEM, the key for its owner's eyes alone"),
    (r"requires a valid client certificate|certificate authentication failed|alert (certificate|unknown ca|bad cert)",
     "it wants a certificate of ours, made for that user by its authority: sslcert, sslkey in PENSTOCK_POSTGRES_DSN"),
    (r"server does not support SSL", "it does not speak TLS: sslmode in PENSTOCK_POSTGRES_DSN, or switch it on there"),
    (r"no pg_hba\.conf entry .*no encryption",
     "it does not talk to that user without TLS: add sslmode=verify-full&sslrootcert=FILE to PENSTOCK_POSTGRES_DSN"),
    (r"no pg_hba\.conf entry", "its pg_hba.conf does not let that user in from here"),
    (r"(password|SCRAM|SASL) authentication failed|no password supplied",
     "it refuses the login: PENSTOCK_POSTGRES_USERNAME and _PASSWORD, or what PENSTOCK_POSTGRES_DSN says"),
    (r"role .* (does not exist|is not permitted to log in)", "it does not know that user: PENSTOCK_POSTGRES_USERNAME"),
    (r"permission denied for database", "that user may not use that database: deploy/roles/postgres/1-roles.sql"),
)  # fmt: skip
"""What libpq and the server say to whoever is not let in (no SQLSTATE comes with it), and what helps. The first that
fits counts."""


def refused(text: str) -> str | None:
    """Why Postgres does not let us in, where only other settings help; None when it is for another reason."""
    return next((why for pattern, why in _REFUSALS if re.search(pattern, text)), None)

"""Accounts → the names that people have in the whole company."""

from __future__ import annotations

from connectors.confluence.model import Person
from connectors.confluence.options import ConfluenceOptions


def principal(person: Person, options: ConfluenceOptions) -> str:
    """The e-mail address in lower case: as the settings map it, as Confluence tells it, or as Data Center's user name
    makes it in the company's domain. Else ``account:ID``, whom no other source knows."""
    for key in (person.id, person.username):
        if key and key in options.principals:
            return options.principals[key]
    if _is_address(person.email):
        return person.email.strip().lower()
    if options.email_domain and person.username:
        domain = options.email_domain.lstrip("@").lower()
        name = person.username.lower()
        if name.endswith(f"@{domain}"):
            return name
        if "@" not in name:
            return f"{name}@{domain}"
    return f"account:{person.username or person.id}"


def is_told(person: Person, options: ConfluenceOptions) -> bool:
    """Whether asking for more about this account can tell nothing new."""
    return not principal(person, options).startswith("account:")


def _is_address(email: str) -> bool:
    name, at, domain = email.strip().rpartition("@")
    return bool(name and at and domain) and not any(char.isspace() for char in email.strip())

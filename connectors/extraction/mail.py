"""Converts EML to Markdown: the main headers, the text, and the names of attachments, which are not read."""

from __future__ import annotations

from datetime import datetime
from email import policy
from email.headerregistry import DateHeader
from email.message import EmailMessage, MIMEPart
from email.parser import BytesParser

from connectors.extraction import markdown
from connectors.extraction.limits import Limits
from connectors.extraction.result import Extracted, Unreadable
from pipeline.core.normalise import normalise

_SHOWN_HEADERS = ("From", "To", "Cc", "Date")
_ENCRYPTED = frozenset({"multipart/encrypted", "application/pkcs7-mime", "application/x-pkcs7-mime"})
"""PGP/MIME (RFC 3156) and S/MIME (RFC 8551)."""
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
"""The errors of the library for a damaged header; the last one is for a date of very many digits."""
MAX_HEADER_CHARACTERS = 2_000
MAX_ATTACHMENTS = 1_000


def read_mail(data: bytes, limits: Limits) -> Extracted:
    """Read a mail. Raises Unreadable: encrypted, broken."""
    try:
        message = BytesParser(policy=policy.default).parsebytes(data)
        if not isinstance(message, EmailMessage) or not message.keys():
            raise Unreadable("broken", "is named as a mail but has no mail headers")
        if message.get_content_type() in _ENCRYPTED and message.get_param("smime-type") != "signed-data":
            raise Unreadable("encrypted", "is an encrypted mail: save its decrypted text")
        part = message.get_body(preferencelist=("plain", "html"))
        attachments = list(message.iter_attachments())
    except _DAMAGED as error:
        raise Unreadable("broken", "has damaged headers, so its text cannot be recognised") from error
    subject = _header(message, "Subject")
    head = [f"{name}: {value}" for name in _SHOWN_HEADERS if (value := _header(message, name))]
    blocks = [markdown.heading(1, subject), "  \n".join(head), _body(part).strip()]
    if names := [_attachment(attached) for attached in attachments[:MAX_ATTACHMENTS]]:
        blocks.append("Attachments:\n" + "\n".join(f"- {name}" for name in names))
    metadata: dict[str, str | int | float | bool] = {"attachments": len(names)}
    if (moment := _date(message)) is not None:
        metadata["sent_at"] = moment.isoformat()
    text = "\n\n".join(block for block in blocks if block)
    return Extracted(
        text + "\n" if text else "", "text/markdown", subject or None, _header(message, "From") or None, metadata
    )


def _header(message: EmailMessage, name: str) -> str:
    """Return a header's value, or "" if it is damaged: the parser raises errors only when a header is read."""
    try:
        value = str(message.get(name, ""))
    except _DAMAGED:
        return ""
    return " ".join(value.split())[:MAX_HEADER_CHARACTERS]


def _date(message: EmailMessage) -> datetime | None:
    try:
        header = message.get("Date")
        return header.datetime if isinstance(header, DateHeader) else None
    except _DAMAGED:
        return None


def _body(part: MIMEPart | None) -> str:
    if part is None:
        return ""
    words = _content(part)
    if part.get_content_type() == "text/html":
        return normalise(words, "text/html")[0]
    return markdown.text(words)


def _content(part: MIMEPart) -> str:
    try:
        return str(part.get_content())
    except _DAMAGED:  # the character set does not exist, or the text is not in it
        payload = part.get_payload(decode=True)
        return payload.decode("utf-8", "replace") if isinstance(payload, bytes) else ""


def _attachment(part: MIMEPart) -> str:
    try:
        name = part.get_filename()
    except _DAMAGED:
        name = None
    label = " ".join((name or "").split())[:200]
    if not label and part.get_content_type() == "message/rfc822":
        inner = part.get_payload()
        label = (
            _header(inner[0], "Subject")[:200] if isinstance(inner, list) and isinstance(inner[0], EmailMessage) else ""
        )
    return f"{label or 'without a name'} ({part.get_content_type()})"

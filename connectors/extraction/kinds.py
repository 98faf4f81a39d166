"""Chooses the reader that a file needs by its first bytes, or else by its name and declared type."""

from __future__ import annotations

import re
from typing import Literal, NewType

from connectors.extraction.result import Unreadable
from pipeline.runtime import plugins

Offered = NewType("Offered", str)
"""An ending, with its dot, of files that an installed distribution reads (the group ``penstock.extractors``)."""
Kind = Literal["text", "pdf", "office", "ole", "mail"]
"""``office``: a zip of XML; its content says whether it is a document, a deck or a workbook. ``ole``: the container of
old Office formats, and of new ones that are encrypted."""

PLUGINS: plugins.Group = "penstock.extractors"
HEAD_BYTES = 1024
OFFICE_ENDINGS = frozenset(
    {"docx", "docm", "dotx", "dotm", "pptx", "pptm", "potx", "ppsx", "ppsm", "xlsx", "xlsm", "xltx", "xltm"}
)
_OWN_ENDINGS = OFFICE_ENDINGS | {"pdf", "eml"}
_OFFICE_TYPES = ("application/vnd.openxmlformats-officedocument.", "application/vnd.ms-")
_ZIP = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
_OPEN_DOCUMENT = re.compile(rb"PK\x03\x04.{26}mimetypeapplication/vnd\.oasis\.opendocument\.", re.DOTALL)
"""The type is the first entry of the zip, as it is (OpenDocument 1.3 part 2, 3.3)."""
_RTF = b"{\\rtf"
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
"""The stream in which Office keeps an encrypted file ([MS-OFFCRYPTO] 2.3.4.4); names in OLE are UTF-16."""


def kind_of(head: bytes, name: str, media_type: str | None = None) -> Kind | Offered:
    """Return the kind of a file. head: its first HEAD_BYTES. Raises Unreadable: broken, unsupported. An extractor
    that is offered comes before plain text and formats that are not read, and after those that are read here."""
    ending = name.rpartition("/")[2].rpartition(".")[2].lower() if "." in name else ""
    declared = (media_type or "").partition(";")[0].strip().lower()
    office = ending in OFFICE_ENDINGS or declared.startswith(_OFFICE_TYPES)
    if is_pdf(head):
        return "pdf"
    is_office = head.startswith(_ZIP) and (office or not ending)
    is_mail = ending == "eml" or declared == "message/rfc822"
    if ending and ending not in _OWN_ENDINGS and not is_office and not is_mail and ending in plugins.offered(PLUGINS):
        return Offered(f".{ending}")
    if unread := "RTF" if head.startswith(_RTF) else "OpenDocument" if _OPEN_DOCUMENT.match(head) else None:
        raise Unreadable(
            "unsupported",
            f"is an {unread} file: save it as .docx, .xlsx or .pptx, or install an extractor for its ending",
        )
    if head.startswith(_OLE):
        return "ole"
    if is_office:
        return "office"
    if is_mail:
        return "mail"
    if head and (ending == "pdf" or declared == "application/pdf") and b"\x00" in head:
        raise Unreadable("broken", "is named as a PDF but does not begin like one (damaged, or another format)")
    if head and ending in OFFICE_ENDINGS:
        raise Unreadable("broken", f"is named .{ending} but does not begin like one (damaged, or another format)")
    return "text"


def is_pdf(head: bytes) -> bool:
    """Readers accept a header anywhere in the first kilobyte; text that merely mentions one is no PDF."""
    return head.startswith(b"%PDF-") or (b"%PDF-" in head[:1024] and b"\x00" in head)


def refuse_ole(data: bytes) -> Unreadable:
    """Return the error that says why a file in an OLE container is not read."""
    if _ENCRYPTED in data:
        return Unreadable("encrypted", "is an Office file that needs a password: save it without one")
    return Unreadable(
        "unsupported",
        "is in an old binary format (.doc, .xls, .ppt, .msg): save it as .docx, .xlsx, .pptx or .eml, or install an"
        " extractor for its ending",
    )

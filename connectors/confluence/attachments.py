"""An attachment's file: fetched into a folder of ours, read in the sandbox, gone."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from connectors.confluence import documents
from connectors.confluence.api import safe
from connectors.confluence.model import Content
from connectors.extraction import Unreadable as NoText
from connectors.extraction import extract_file
from connectors.source import Entry, Gone
from connectors.web import Forbidden, Missing, TooLarge, Web


class Files:
    def __init__(self, web: Web, folder: Path, *, cloud: bool, max_bytes: int) -> None:
        self._web, self._folder, self._cloud, self._max_bytes = web, folder, cloud, max_bytes

    async def read(self, attachment: Content, names: Mapping[str, str], base: str | None) -> Entry:
        """Raises what the client raises for a source that is away."""
        if attachment.required is None:
            return documents.hidden(attachment)
        too_large = f"is larger than {self._max_bytes:,} bytes: raise max_attachment_bytes, or divide the file"
        if attachment.size > self._max_bytes:
            return documents.unreadable(attachment, "too_large", too_large)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"attachment-{secrets.token_hex(8)}"
        try:
            await self._web.download(self._address(attachment), file, max_bytes=self._max_bytes)
            found = await extract_file(file, attachment.title, attachment.media_type or None)
        except Missing:
            return Gone(attachment.id)
        except TooLarge:
            return documents.unreadable(attachment, "too_large", too_large)
        except Forbidden:
            message = "lies at an address that may not be asked: if the host is your own, add it to media_hosts"
            return documents.unreadable(attachment, "forbidden_address", message)
        except NoText as error:
            return documents.unreadable(attachment, error.code, str(error))
        finally:
            file.unlink(missing_ok=True)
        return documents.document(attachment, found.text, found.media_type, names, base, found.metadata)

    def _address(self, attachment: Content) -> str:
        """Cloud: https://developer.atlassian.com/cloud/confluence/rest/v1/api-group-content---attachments/, which
        redirects to the media store; Data Center: the link that its answer holds, relative to the base address."""
        if self._cloud:
            container, id_ = safe(attachment.container or ""), safe(attachment.id)
            return f"rest/api/content/{container}/child/attachment/{id_}/download"
        return (
            attachment.download or f"download/attachments/{safe(attachment.container or '')}/{safe(attachment.title)}"
        )

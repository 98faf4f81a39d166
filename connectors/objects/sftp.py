"""SFTP for fsspec, whose own class accepts any host key."""

from __future__ import annotations

import stat
from typing import Any

import fsspec
import paramiko
from fsspec.implementations.sftp import SFTPFileSystem
from paramiko.sftp import CMD_NAME

from connectors.objects.store import MOST_NAMES, SFTP, FolderTooLarge
from pipeline.core.errors import Misconfigured

SPECIAL = (stat.S_ISFIFO, stat.S_ISCHR, stat.S_ISBLK, stat.S_ISSOCK)
TIMEOUT_SECONDS = 60.0
"""For connecting to a server, and for each of its answers."""


def register() -> None:
    """Have fsspec use the class of this module."""
    for protocol in SFTP:
        fsspec.register_implementation(protocol, VerifiedSFTP, clobber=True)


class OnlyKnown(paramiko.MissingHostKeyPolicy):
    def missing_host_key(self, client: object, hostname: str, key: object) -> None:
        raise Misconfigured(
            f"the host key of {hostname} is not in known_hosts: compare it with the server's, then add it"
            " (ssh-keyscan), or name the file in settings.known_hosts"
        )


class Reply(paramiko.Message):
    def get_text(self) -> str:
        """Keep bytes of a name that are not UTF-8, for which paramiko would refuse the whole listing."""
        return self.get_string().decode("utf-8", "surrogateescape")


class AnyNames(paramiko.SFTPClient):
    names = 0
    """How many names the server has sent since the beginning of the listing."""

    def _read_packet(self) -> tuple[int, bytes]:
        kind, reply = super()._read_packet()  # type: ignore[misc]
        if kind == CMD_NAME:
            self.names += int.from_bytes(reply[4:8])  # after the number of the request
            if self.names > MOST_NAMES:
                raise FolderTooLarge
        return kind, reply

    def _request(self, t: int, *args: Any) -> tuple[int, paramiko.Message]:
        kind, reply = super()._request(t, *args)  # type: ignore[misc]
        return kind, Reply(reply.get_remainder()) if kind == CMD_NAME else reply


class VerifiedSFTP(SFTPFileSystem):  # type: ignore[misc]
    """Accepts only host keys that are in known_hosts."""

    def _connect(self) -> None:
        arguments = {"timeout": TIMEOUT_SECONDS, "allow_agent": False, **self.ssh_kwargs}
        arguments.pop("use_listings_cache", None)  # of fsspec
        known_hosts = arguments.pop("known_hosts", None)
        self.client = paramiko.SSHClient()
        if known_hosts is None:
            self.client.load_system_host_keys()
        else:
            self.client.load_host_keys(str(known_hosts))
        self.client.set_missing_host_key_policy(OnlyKnown())
        self.client.connect(self.host, **arguments)
        transport = self.client.get_transport()
        assert transport is not None
        ftp: Any = AnyNames.from_transport(transport)
        self.ftp = ftp
        if (channel := ftp.get_channel()) is not None:
            channel.settimeout(TIMEOUT_SECONDS)

    def info(self, path: str) -> dict[str, Any]:
        """Describe a link as one, as a listing does."""
        path = self._strip_protocol(path)
        return {**self._decode_stat(self.ftp.lstat(path)), "name": path}

    def ls(self, path: str, detail: bool = False) -> Any:
        self.ftp.names = 0
        try:
            return super().ls(path, detail)
        except UnicodeDecodeError:
            self.ftp.names = 0
            path = self._strip_protocol(path)
            return [self._decode_stat(entry, path) for entry in self.ftp.listdir_attr(path)]

    def isfile(self, path: str) -> bool:
        """Whether a path leads to a file. Follows links."""
        try:
            return bool(self._decode_stat(self.ftp.stat(self._strip_protocol(path)))["type"] == "file")
        except FileNotFoundError:
            return False

    def _decode_stat(self, file: Any, parent_path: str | None = None) -> dict[str, Any]:
        """Describe a pipe or a device, which would be waited for without end, as no file."""
        decoded: dict[str, Any] = super()._decode_stat(file, parent_path)
        is_special = any(is_kind(file.st_mode) for is_kind in SPECIAL)
        return {**decoded, "type": "other"} if is_special else decoded

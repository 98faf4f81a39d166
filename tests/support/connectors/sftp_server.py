"""A server of SFTP on a folder, by the library whose client the product uses."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import paramiko
from paramiko.common import AUTH_FAILED, AUTH_SUCCESSFUL, OPEN_SUCCEEDED
from paramiko.sftp import SFTP_OK, SFTP_PERMISSION_DENIED

USER, PASSWORD = "reader", "a long password"


@dataclass
class SftpServer:
    folder: Path
    port: int
    key: paramiko.PKey
    denied: set[str] = field(default_factory=set)
    """Names of folders that nobody may list, and of files that nobody may read."""
    connections: list[paramiko.Transport] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"sftp://{USER}@127.0.0.1:{self.port}"

    def write_known_hosts(self, file: Path, key: paramiko.PKey | None = None) -> Path:
        key = key or self.key
        file.write_text(f"[127.0.0.1]:{self.port} {key.get_name()} {key.get_base64()}\n")
        return file

    def disconnect(self) -> None:
        for transport in self.connections:
            transport.close()
        self.connections.clear()


class _Login(paramiko.ServerInterface):
    def check_auth_password(self, username: str, password: str) -> int:
        permitted = (username, password) == (USER, PASSWORD)
        return AUTH_SUCCESSFUL if permitted else AUTH_FAILED

    def get_allowed_auths(self, username: str) -> str:
        return "password"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED


def _name(name: str) -> str:
    """Return a name as OpenSSH sends it: its bytes, of any encoding."""
    return name if name.isprintable() else cast("str", os.fsencode(name))


class _Handle(paramiko.SFTPHandle):
    readfile: IO[bytes]
    writefile: IO[bytes]


class _Files(paramiko.SFTPServerInterface):
    def __init__(self, server: paramiko.ServerInterface, served: SftpServer) -> None:
        super().__init__(server)
        self._served = served

    def _real(self, path: str) -> Path:
        return self._served.folder / self.canonicalize(path).lstrip("/")

    def list_folder(self, path: str) -> list[paramiko.SFTPAttributes] | int:
        real = self._real(path)
        if real.name in self._served.denied:
            return SFTP_PERMISSION_DENIED
        try:
            return [
                paramiko.SFTPAttributes.from_stat(entry.stat(follow_symlinks=False), _name(entry.name))
                for entry in os.scandir(real)
            ]
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or 0)

    def stat(self, path: str) -> paramiko.SFTPAttributes | int:
        try:
            return paramiko.SFTPAttributes.from_stat(self._real(path).stat())
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or 0)

    def lstat(self, path: str) -> paramiko.SFTPAttributes | int:
        try:
            return paramiko.SFTPAttributes.from_stat(self._real(path).lstat())
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or 0)

    def open(self, path: str, flags: int, attr: paramiko.SFTPAttributes) -> paramiko.SFTPHandle | int:
        if self._real(path).name in self._served.denied:
            return int(SFTP_PERMISSION_DENIED)
        try:
            descriptor = os.open(self._real(path), flags, 0o600)
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or 0)
        handle = _Handle(flags)
        file = os.fdopen(
            descriptor, "rb" if not flags & (os.O_WRONLY | os.O_RDWR) else "r+b" if flags & os.O_RDWR else "wb"
        )
        handle.readfile = handle.writefile = cast("IO[bytes]", file)
        return handle

    def _do(self, action: object, *paths: str) -> int:
        try:
            action(*map(self._real, paths))  # type: ignore[operator]
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or 0)
        return int(SFTP_OK)

    def remove(self, path: str) -> int:
        return self._do(os.remove, path)

    def rename(self, oldpath: str, newpath: str) -> int:
        return self._do(os.rename, oldpath, newpath)

    posix_rename = rename

    def mkdir(self, path: str, attr: paramiko.SFTPAttributes) -> int:
        return self._do(os.mkdir, path)

    def rmdir(self, path: str) -> int:
        return self._do(os.rmdir, path)


@contextmanager
def sftp_server(folder: Path) -> Iterator[SftpServer]:
    """Serve the folder to one user with a password."""
    listening = socket.create_server(("127.0.0.1", 0))
    served = SftpServer(folder, listening.getsockname()[1], paramiko.ECDSAKey.generate())

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            transport.add_server_key(served.key)
            transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _Files, served)
            served.connections.append(transport)
            with suppress(paramiko.SSHException, EOFError):
                transport.start_server(server=_Login())

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        served.disconnect()
        thread.join(10)

"""Certificates of `python -m deploy.certificates` for one machine: a server's peers accept its own and no other."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from deploy.certificates import main

ME = os.getuid()


def greet(folder: Path, server: str, host: str) -> None:
    """A handshake with who shows this server's certificate, by who trusts the authority. Raises SSLError."""
    showing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    showing.load_cert_chain(folder / server / f"{server}.both.pem")
    trusting = ssl.create_default_context(cafile=str(folder / "ca" / "ca.crt"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        answering = threading.Thread(target=lambda: showing.wrap_socket(theirs, server_side=True).close())
        answering.start()
        try:
            trusting.wrap_socket(ours, server_hostname=host).close()
        finally:
            ours.close()
            answering.join(10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert main([str(tmp_path), f"kafka={ME}", f"postgres={ME}"]) == 0
    return tmp_path


@pytest.mark.parametrize("host", ["kafka", "localhost", "127.0.0.1"])
def test_a_servers_certificate_is_valid_for_its_name_and_localhost(folder: Path, host: str) -> None:
    greet(folder, "kafka", host)


def test_keys_are_readable_only_by_their_owner_and_certificates_last_for_years(folder: Path) -> None:
    for server in ("kafka", "postgres"):
        for file in (f"{server}.key", f"{server}.both.pem"):
            assert stat.S_IMODE((folder / server / file).stat().st_mode) == 0o600
        shown = x509.load_pem_x509_certificate((folder / server / f"{server}.crt").read_bytes())
        assert shown.not_valid_after_utc > datetime.now(UTC) + timedelta(days=3600)
        assert (folder / server / "ca.crt").read_bytes() == (folder / "ca" / "ca.crt").read_bytes()
    assert not list((folder / "ca").glob("*.key")), "the authority's own key is on no disk"


def test_a_complete_set_of_certificates_is_retained_and_an_incomplete_one_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in folder.rglob("*.*")}
    assert main([str(folder), f"kafka={ME}", f"postgres={ME}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "certificates: there already"
    assert {file: file.read_bytes() for file in folder.rglob("*.*")} == before
    for missing in ("postgres/postgres.crt", "postgres/postgres.key", "kafka/ca.crt", "ca/ca.crt"):
        (folder / missing).unlink()
        assert main([str(folder), f"kafka={ME}", f"postgres={ME}"]) == 0
        assert "start whatever runs anew" in capsys.readouterr().out
        assert not [file for file, content in before.items() if file.read_bytes() == content]
        greet(folder, "postgres", "postgres")
        before = {file: file.read_bytes() for file in before}


def test_keys_whose_owner_could_not_be_set_do_not_count_as_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of docker-compose.yml is tried again when it fails: the second time it said that all was there."""

    def forbidden(*_: object) -> None:
        raise PermissionError("chown")

    with monkeypatch.context() as patch:
        patch.setattr(os, "chown", forbidden)
        for _ in range(2):
            with pytest.raises(PermissionError):
                main([str(tmp_path), f"kafka={ME + 1}"])


@pytest.mark.parametrize("wrong", [[], ["FOLDER", "kafka"], ["FOLDER", "kafka=appuser"]])
def test_wrong_arguments_print_the_usage(wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path) if problem == "FOLDER" else problem for problem in wrong]) == 2
    assert "usage: python -m deploy.certificates" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

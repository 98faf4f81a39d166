"""Peers are installed from their locks: of each package, files whose hashes are in this repository."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from bench.peers.environments import HERE, PEERS, NotInstalled, Peer, python_of
from bench.peers.lock import locked
from deploy.lock import name

COMPILED = """
[[packages]]
name = "one"
version = "1.0"
wheels = [
    {url = "https://i/one-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", hashes = {sha256 = "bb"}},
    {url = "https://i/one-1.0-cp37-abi3-manylinux_2_28_aarch64.whl", hashes = {sha256 = "aa"}},
    {url = "https://i/one-1.0-cp310-cp310-manylinux_2_17_x86_64.whl", hashes = {sha256 = "cc"}},
    {url = "https://i/one-1.0-cp311-cp311-win_amd64.whl", hashes = {sha256 = "dd"}},
    {url = "https://i/one-1.0-cp311-cp311-musllinux_1_2_x86_64.whl", hashes = {sha256 = "ee"}},
]
[[packages]]
name = "two"
version = "2"
marker = "python_full_version >= '3.12'"
wheels = [{url = "https://i/two-2-py2.py3-none-any.whl", hashes = {sha256 = "ff"}}]
[[packages]]
name = "three"
version = "3"
marker = "sys_platform == 'win32'"
wheels = [{url = "https://i/three-3-py3-none-win_amd64.whl", hashes = {sha256 = "00"}}]
"""


def test_a_lock_holds_the_hashes_of_wheels_for_linux_alone() -> None:
    assert locked(COMPILED) == (
        "one==1.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
        "two==2 ; python_full_version >= '3.12' \\\n    --hash=sha256:ff\n"
    )
    with pytest.raises(SystemExit, match=r"four==4 has no wheel"):
        locked('packages = [{name = "four", version = "4", wheels = []}]')


def test_every_peer_has_a_lock_with_all_of_its_requirements() -> None:
    required = sorted(HERE.glob("*.txt"))
    assert {file.stem for file in required} == {peer.environment for peer in PEERS} - {"penstock"}
    for file in required:
        blocks = [block for block in file.with_suffix(".lock").read_text().split("\n") if "==" in block]
        pins = {name(line): line.split("==")[1].split()[0] for line in blocks if not line.startswith(" ")}
        for line in file.read_text().split():
            package, version = line.split("==")
            assert pins[name(package)] == version, f"{line}: run python -m bench.peers.lock {file.stem}"


@pytest.mark.heavy
def test_a_peer_whose_package_has_other_bytes_than_its_lock_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny.py", "")
        file.writestr("tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
        file.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("tiny-1.dist-info/RECORD", "")
    lock = tmp_path / "tiny.lock"
    monkeypatch.setattr(Peer, "lock", lock)
    peer = Peer("tiny", "Tiny", "bench.peers.tiny")
    lock.write_text(f"tiny @ {wheel.as_uri()} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    assert python_of(peer, tmp_path, lambda line: None).exists()
    for changed in (f"tiny @ {wheel.as_uri()} --hash=sha256:{'0' * 64}\n", f"tiny @ {wheel.as_uri()}\n"):
        lock.write_text(changed)
        with pytest.raises(NotInstalled, match=r"tiny\.lock"):
            python_of(peer, tmp_path, lambda line: None)

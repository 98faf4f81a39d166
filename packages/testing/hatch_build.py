"""Both distributions have one version, and each of them fits only the same one of the other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        project = tomllib.loads((Path(self.root).parents[1] / "pyproject.toml").read_text())["project"]
        [aiohttp] = [line for line in project["optional-dependencies"]["worker"] if re.match(r"aiohttp\b", line)]
        [graphql] = [line for line in project["optional-dependencies"]["dev"] if re.match(r"graphql-core\b", line)]
        metadata["dependencies"] = [f"penstock[connectors]=={project['version']}", aiohttp, graphql]

"""Google's discovery documents as a judge of every exchange, and Google's own client made from them."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, unquote

import httplib2
from google.oauth2 import service_account
from google_auth_httplib2 import AuthorizedHttp
from googleapiclient import discovery
from starlette.types import Receive, Scope, Send

from connectors.fakes.google_drive import FakeGoogleDrive
from connectors.google_drive.client import DRIVE_SCOPE, MEMBER_SCOPE, USER_SCOPE
from tests.support.connectors.exchange import Exchange, recorded
from tests.support.connectors.google_drive_kit import Desk

DOCUMENTS = {
    name: json.loads(files("googleapiclient.discovery_cache").joinpath(f"documents/{name}.json").read_text())
    for name in ("drive.v3", "admin.directory_v1")
}


def strict(schema: Any) -> Any:
    """A discovery schema as JSON Schema that takes no property beyond the published ones."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return {"$ref": f"#/definitions/{schema['$ref']}"}
    kept = {name: strict(schema[name]) for name in ("type", "items", "enum") if name in schema}
    if "properties" in schema:
        kept["properties"] = {name: strict(property_) for name, property_ in schema["properties"].items()}
        kept["additionalProperties"] = strict(schema.get("additionalProperties", False))
    if schema.get("format") == "date-time":
        kept["pattern"] = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$"
    if schema.get("format") in ("int64", "uint64"):
        kept["pattern"] = r"^-?\d+$"
    return kept


def methods(resources: Any) -> Any:
    for resource in resources.values():
        yield from resource.get("methods", {}).values()
        yield from methods(resource.get("resources", {}))


class Recorder:
    """Judges every exchange by the discovery documents."""

    def __init__(self, fake: FakeGoogleDrive) -> None:
        self._fake = fake
        self.judged: dict[str, int] = {}
        self.wrong: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/token":
            await self._fake(scope, receive, send)
            return
        exchange = await recorded(self._fake, scope, receive, send)
        self._judge(scope["method"], scope["path"], parse_qs(scope["query_string"].decode()), exchange)

    def _judge(self, method: str, path: str, query: dict[str, Any], exchange: Exchange) -> None:
        name, spec = self._method(method, unquote(path))
        if spec is None:
            self.wrong.append(f"{method} {path}: no such method")
            return
        self.judged[name] = self.judged.get(name, 0) + 1
        document = DOCUMENTS[name.partition(" ")[0]]
        known = spec.get("parameters", {}).keys() | document["parameters"].keys()
        if extra := query.keys() - known:
            self.wrong.append(f"{name}: parameters {sorted(extra)}")
        deprecated = {item for item in query if spec.get("parameters", {}).get(item, {}).get("deprecated")}
        if deprecated:
            self.wrong.append(f"{name}: deprecated {sorted(deprecated)}")
        if not {DRIVE_SCOPE, MEMBER_SCOPE, USER_SCOPE} & set(spec["scopes"]):
            self.wrong.append(f"{name}: not allowed with our scopes")
        if exchange.request and spec.get("request"):
            self._valid(name, document, spec["request"], json.loads(exchange.request))
        if exchange.status == 200 and spec.get("response") and query.get("alt") != ["media"]:
            self._valid(name, document, spec["response"], json.loads(exchange.response))
        if exchange.status >= 400 and set(json.loads(exchange.response)) != {"error"}:
            self.wrong.append(f"{name}: an error of another shape")

    def _method(self, method: str, path: str) -> tuple[str, Any]:
        for document, content in DOCUMENTS.items():
            for spec in methods(content["resources"]):
                pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(f"/{content['servicePath']}{spec['path']}"))
                if spec["httpMethod"] == method and re.fullmatch(pattern, path):
                    return f"{document} {spec['id']}", spec
        return "", None

    def _valid(self, name: str, document: Any, ref: Any, value: Any) -> None:
        import jsonschema  # here, because it takes a second

        schema = {**strict(ref), "definitions": {id_: strict(schema) for id_, schema in document["schemas"].items()}}
        errors = jsonschema.Draft7Validator(schema).iter_errors(value)
        self.wrong += [f"{name}: {'/'.join(map(str, error.path))}: {error.message}" for error in errors]


def google(desk: Desk, name: str, *, token: str | None = None, subject: str | None = None) -> Any:
    """Google's own client, from Google's own document, at the fake's address."""
    document = {"drive": "drive.v3", "admin": "admin.directory_v1"}[name]
    content = {**DOCUMENTS[document], "rootUrl": f"{desk.url}/", "mtlsRootUrl": f"{desk.url}/"}
    content["baseUrl"] = f"{desk.url}/{content['servicePath']}"
    scopes = [DRIVE_SCOPE] if name == "drive" else [MEMBER_SCOPE]
    credentials = service_account.Credentials.from_service_account_info(
        json.loads(desk.key), scopes=scopes, subject=subject
    )
    http = AuthorizedHttp(credentials, http=httplib2.Http(timeout=10))
    if token:

        class Bearer(httplib2.Http):
            def request(self, uri: str, *args: Any, headers: Any = None, **more: Any) -> Any:
                return super().request(
                    uri, *args, headers={**(headers or {}), "authorization": f"Bearer {token}"}, **more
                )

        http = Bearer(timeout=10)
    client = discovery.build_from_document(content, http=http)
    desk.afterwards.append(client.close)
    return client

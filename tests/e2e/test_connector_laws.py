"""Every law × every kind of connector, with real workers, through Kafka into the ledger and both stores.

A connector joins by a line in KINDS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from connectors.conform.run import ALL_LAWS, try_law
from connectors.conform.trial import Trial
from connectors.declared import source_class
from deploy.local.stack import Stack
from pipeline.kafka.client import producer
from pipeline.stores.postgres import open_pool
from tests.support.pipeline.oracle import assert_equal
from tests.support.space import Space
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

pytestmark = pytest.mark.stack

KINDS = (
    "examples.notes:Notes",
    "penstock.template.source:Tickets",
    "airbyte",
    "connectors.airbyte.playground:ChangesStream",
    "confluence",
    "connectors.confluence.playground:ConfluenceDataCenter",
    "database",
    "connectors.database.playground:ChangesTopic",
    "connectors.database.playground:PostgresTable",
    "folder",
    "git",
    "github",
    "connectors.github.playground:GitHubWikis",
    "google-drive",
    "jira",
    "connectors.jira.playground:JiraDataCenter",
    "objects",
    "connectors.objects.playground:FileObjects",
    "connectors.objects.playground:S3Objects",
    "sharepoint",
    "slack",
    "uploads",
    "web",
)


WITHOUT_EVENTS = frozenset(
    {
        "penstock.template.source:Tickets",
        "airbyte",
        "connectors.airbyte.playground:ChangesStream",
        "database",
        "connectors.database.playground:ChangesTopic",
        "connectors.database.playground:PostgresTable",
        "folder",
        "objects",
        "connectors.objects.playground:FileObjects",
        "connectors.objects.playground:S3Objects",
        "uploads",
        "web",
    }
)
"""Those whose playground sends no events; of the others the law of events has to see some."""


QUICK_KINDS = ("airbyte", "database", "folder", "git", "objects", "slack", "uploads", "web")
"""Those with the law of revocations in `make test`. That of the others is also tried without workers, in
tests/contract/connectors/test_membership_age.py."""


def is_quick(kind: str, law: str) -> bool:
    """`make test` tries the example with all laws, and QUICK_KINDS with the one of revocations, which depends most on
    how a kind reads its source; `make test-slow` the rest."""
    return kind == KINDS[0] or (law == "member-removed" and kind in QUICK_KINDS)


@pytest.fixture(scope="module")
def space(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Space]:
    """One for all laws: each has a tenant of its own."""
    opened = Space.create(stack, tmp_path_factory.mktemp("laws"))
    with asyncio.Runner() as runner:
        space = runner.run(opened.__aenter__())
        try:
            space.start("detect", "vectors", "keywords")
            yield space
        finally:
            runner.run(opened.__aexit__(None, None, None))


def published_documents(trial: Trial) -> list[DocumentUpserted]:
    """Return what the runner has published, folded: each document's last text under its last access."""
    documents: dict[str, DocumentUpserted] = {}
    for message in sorted(trial.witness.messages, key=lambda m: m.observed_at):
        if isinstance(message, DocumentUpserted):
            documents[message.external_id] = message
        elif isinstance(message, DocumentDeleted):
            documents.pop(message.external_id, None)
        elif isinstance(message, AccessChanged) and message.external_id in documents:
            access = {"acl_tags": message.acl_tags, "required_tags": message.required_tags}
            documents[message.external_id] = documents[message.external_id].model_copy(update=access)
    return [document for document in documents.values() if document.acl_tags]


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        pytest.param(kind, law, marks=() if is_quick(kind, law) else pytest.mark.slow)
        for kind in KINDS
        for law in ALL_LAWS
    ],
)
async def test_every_connector_kind_conforms_to_every_law(
    space: Space, kind: str, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KAFKA_BOOTSTRAP", space.settings.kafka.bootstrap)  # of playgrounds

    async def stores(trial: Trial) -> None:
        await assert_equal(space, published_documents(trial))

    async with open_pool(space.settings.postgres) as pool, producer(space.settings.kafka) as kafka:
        verdict = await try_law(law, source_class(kind), space.settings, pool, kafka, in_stores=stores)
    assert verdict.holds, f"{kind} breaks the law {law}: {verdict.why}"
    if law == "webhook-doubled":
        assert (kind in WITHOUT_EVENTS) == ("sends no events" in verdict.why)

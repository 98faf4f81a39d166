"""Every published version of the wire, byte by byte: new code must read old records, and write what was promised.

The files are the promise. A file that was released is never edited: a change that breaks one needs a new version.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from topics.codec import decode, encode
from topics.messages import (
    MESSAGES,
    AccessChanged,
    AnswerInvalidated,
    AnyMessage,
    ConflictChanged,
    ConversationForgotten,
    ConversationRecorded,
    DocumentDeleted,
    DocumentIndexed,
    DocumentUpserted,
    IdentityChanged,
    IndexHint,
    Pair,
)

FOLDER = Path(__file__).parents[2] / "golden" / "wire" / "v1"

OBSERVED = datetime(2026, 3, 1, 9, 30, 0, 250_000, tzinfo=UTC)
MEMBER = {"tenant": "acme", "source": "assistant", "observed_at": OBSERVED, "member": "ada@example.org"}
PAGE = {"tenant": "acme", "source": "wiki", "external_id": "HR/leave policy.md", "observed_at": OBSERVED}

EXPECTED: dict[str, AnyMessage] = {
    "document.upserted.v1": DocumentUpserted(
        **PAGE,
        version=1_772_357_400_250_000_000,
        title="Leave policy – 休暇",
        content="# Leave\n\nThirty days a year.\nDreißig Tage. 30日 🏖\n",
        media_type="text/markdown",
        acl_tags=["all-staff", "hr"],
        required_tags=["restriction:4711"],
        source_url="https://wiki.example.org/hr/leave?v=3",
        author="Ada Lovelace",
        source_modified_at=datetime(2026, 2, 28, 22, 15, tzinfo=UTC),
        metadata={
            "space": "HR",
            "labels": ["policy", "2026"],
            "reviewed": True,
            "revision": 3,
            "score": 0.5,
            "expires": None,
        },
    ),
    "document.upserted.v1.minimal": DocumentUpserted(
        tenant="acme",
        source="wiki",
        external_id="note",
        observed_at=datetime(2026, 3, 1, 9, 30, tzinfo=UTC),
        version=0,
        title="",
        content="",
        acl_tags=[],
    ),
    "document.upserted.v1.unknown-fields": DocumentUpserted(
        tenant="acme",
        source="wiki",
        external_id="note",
        observed_at=datetime(2026, 3, 1, 9, 30, tzinfo=UTC),
        version=9_007_199_254_740_993,
        title="From a newer producer",
        content="text",
        acl_tags=["a", "b"],
    ),
    "document.deleted.v1": DocumentDeleted(**PAGE, version=1_772_357_400_250_000_001),
    "document.access-changed.v1": AccessChanged(
        **PAGE, acl_tags=["hr"], required_tags=["restriction:4711", "restriction:4712"]
    ),
    "identity.changed.v1": IdentityChanged(
        tenant="acme", source="wiki", observed_at=OBSERVED, principal="ada@example.org", groups=["all-staff", "hr"]
    ),
    "index.hint.v1": IndexHint(**PAGE, document_id="5f3720d3-6c24-585e-9281-48cc4e727bbf", generation="g1"),
    "answer.invalidated.v1": AnswerInvalidated(
        tenant="acme",
        source="standing",
        observed_at=OBSERVED,
        question_id=UUID("0f1e2d3c-4b5a-4978-8695-a4b3c2d1e0f1"),
        change="changed",
        sentences=[1, 3],
        asked_at=datetime(2026, 2, 27, 8, 0, tzinfo=UTC),
    ),
    "document.indexed.v1": DocumentIndexed(
        **PAGE,
        document_id="5f3720d3-6c24-585e-9281-48cc4e727bbf",
        seq=4_711,
        version=1_772_357_400_250_000_000,
        state="searchable",
        generation="g1",
        chunks=2,
    ),
    "conflict.changed.v1": ConflictChanged(
        tenant="acme",
        source="wiki",
        observed_at=OBSERVED,
        conflict_id=UUID("0b1a4f0e-5c1d-5a53-9d0e-3f1f6c1a2b3c"),
        state="open",
        difference="number",
        documents=[UUID("5f3720d3-6c24-585e-9281-48cc4e727bbf"), UUID("0f8fad5b-d9cb-569f-a165-70867728950e")],
        passages=[UUID("7c9e6679-7425-50de-944b-e07fc1f90ae7"), UUID("3d813cbb-47fb-52ba-91df-831e1593ac29")],
    ),
    "conversation.recorded.v1": ConversationRecorded(
        **MEMBER,
        conversation="2026-03/leave",
        pairs=[
            Pair(
                question="How many days of leave do I have?",
                answer="Thirty. Dreißig. 30日 🏖",
                asked_at=datetime(2026, 3, 1, 9, 29, 58, tzinfo=UTC),
                id="m-17",
                answer_id=UUID("0f8fad5b-d9cb-469f-a165-70867728950e"),
            ),
            Pair(question="And next year?", answer="", asked_at=datetime(2026, 3, 1, 9, 29, 59, 500_000, tzinfo=UTC)),
        ],
    ),
    "conversation.recorded.v1.minimal": ConversationRecorded(
        tenant="acme",
        source="assistant",
        observed_at=datetime(2026, 3, 1, 9, 30, tzinfo=UTC),
        member="ada@example.org",
        conversation="c",
        pairs=[Pair(question="?", answer="!", asked_at=datetime(2026, 3, 1, 9, 30, tzinfo=UTC))],
    ),
    "conversation.forgotten.v1": ConversationForgotten(**MEMBER, conversation="2026-03/leave"),
    "conversation.forgotten.v1.minimal": ConversationForgotten(**MEMBER),
}
READ_ONLY = {
    "document.upserted.v1.minimal",
    "document.upserted.v1.unknown-fields",
    "conversation.recorded.v1.minimal",
    "conversation.forgotten.v1.minimal",
}
"""Messages that others may send and we never do: they are read, but not written in the same form."""


def golden(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / f"{name}.json").read_text()))


def headers(record: dict[str, Any]) -> list[tuple[str, bytes]]:
    return [(name, value.encode()) for name, value in record["headers"].items()]


def test_every_golden_file_and_message_type_is_covered() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(EXPECTED)
    assert set(MESSAGES) <= set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_records_are_decoded_as_expected(name: str) -> None:
    record = golden(name)
    assert decode(json.dumps(record["value"]).encode(), headers(record)) == EXPECTED[name]
    assert EXPECTED[name].key == record["key"]


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - READ_ONLY))
def test_messages_are_encoded_as_in_the_golden_files(name: str) -> None:
    record, written = golden(name), encode(EXPECTED[name], traceparent=golden(name)["headers"].get("traceparent"))
    assert json.loads(written.value) == record["value"]
    assert written.key.decode() == record["key"]
    assert written.headers == headers(record)

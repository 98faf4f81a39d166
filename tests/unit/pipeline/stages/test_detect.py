"""detect's pure half: reading events and folding a batch."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from urllib.parse import quote
from uuid import uuid4

import pytest
import regex

from pipeline.core.addresses import openable
from pipeline.core.errors import Poison
from pipeline.core.fold import State
from pipeline.ledger.documents import Known
from pipeline.stages.events import Arrival, read_message, to_arrival
from pipeline.stages.folding import fold_batch
from pipeline.stages.stage import Incoming
from query.access.documents import Document
from query.model import Passage
from topics.codec import encode
from topics.messages import AccessChanged, AnyMessage, DocumentDeleted, DocumentUpserted, IdentityChanged

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def upsert(version: int = 1, second: int = 0, **fields: object) -> DocumentUpserted:
    return DocumentUpserted(
        **{  # type: ignore[arg-type]
            "tenant": "t",
            "source": "s",
            "external_id": "d",
            "observed_at": NOW + timedelta(seconds=second),
            "version": version,
            "title": "T",
            "content": "some text",
            "acl_tags": ["a"],
            **fields,
        }
    )


def incoming(message: AnyMessage, *, key: bytes | None = None) -> Incoming:
    record = encode(message)
    return Incoming("documents.live.v1", 0, 0, key or record.key, record.value, record.headers, "live")


def read(message: AnyMessage, **options: bytes) -> Arrival:
    return to_arrival(read_message(incoming(message, **options), now=NOW), "live")


def test_access_tags_are_qualified_by_their_source() -> None:
    event = read(upsert(required_tags=["r"])).event
    assert (event.acl_tags, event.required_tags) == (("s/a",), ("s/r",))  # type: ignore[union-attr]


def test_an_event_under_another_documents_key_is_poison() -> None:
    with pytest.raises(Poison) as refused:
        read(upsert(), key=b"t/s/other")
    assert refused.value.code == "wrong_key"


def test_an_event_observed_in_the_future_is_poison() -> None:
    with pytest.raises(Poison) as refused:
        read(upsert(second=301))
    assert refused.value.code == "from_the_future"
    read(upsert(second=299))


def test_an_identity_event_on_a_document_topic_is_poison() -> None:
    message = IdentityChanged(tenant="t", source="s", principal="p", groups=[], observed_at=NOW)
    with pytest.raises(Poison) as refused:
        read(message)
    assert refused.value.code == "wrong_topic"


def test_the_same_text_with_other_line_endings_is_unchanged() -> None:
    one, two = read(upsert(content="a\r\nb")), read(upsert(2, 1, content="a\nb"))
    [folded] = fold_batch([one, two], {}).values()
    assert [step.outcome for _, step in folded.steps] == ["created", "unchanged"]


def test_every_event_of_a_batch_is_folded_not_only_the_newest() -> None:
    delete = DocumentDeleted(tenant="t", source="s", external_id="d", observed_at=NOW + timedelta(seconds=2), version=9)
    access = AccessChanged(
        tenant="t", source="s", external_id="d", observed_at=NOW + timedelta(seconds=3), acl_tags=["b"]
    )
    batch = [read(m) for m in (upsert(9, 1), delete, upsert(1, 3, content="new"), access, upsert(10, 2))]
    [folded] = fold_batch(batch, {}).values()
    assert [step.outcome for _, step in folded.steps] == ["created", "deleted", "recreated", "access", "stale"]
    assert folded.state.version == 1
    assert folded.content is batch[2]


def test_content_the_ledger_already_holds_is_not_chunked_again() -> None:
    [first] = fold_batch([read(upsert())], {}).values()
    known = Known(first.state, seq=5, media_type="text/plain", title="T")
    [same] = fold_batch([read(upsert(2, 1))], {first.identity.id: known}).values()
    assert not same.needs_chunking(titled=True)
    [again] = fold_batch([read(upsert(2, 1, title="Another"))], {first.identity.id: known}).values()
    assert again.changes == {"metadata"}
    assert not again.needs_chunking(titled=False)
    assert again.needs_chunking(titled=True), "its chunks have the title"
    [other] = fold_batch([read(upsert(2, 1, media_type="text/markdown"))], {first.identity.id: known}).values()
    assert other.needs_chunking(titled=False), "the same text is cut otherwise"
    assert first.before.state == State()


SCRIPTS = [
    "javascript:alert(1)",
    "JavaScript://x/%0aalert(1)",
    "java\tscript:alert(1)",
    " javascript:alert(1)",
    "data:text/html,<script>",
    "vbscript:x",
    "//evil.example",
    "https:evil",
    "http://a\nb",
    "",
    "file://evil.example/share/a.pdf",
    "file:////evil.example/share",
    "file://localhost//evil.example/share",
    "file:///a/..//evil.example/share",
    "file:///\\evil.example\\share",
    "file:\\\\evil.example\\share",
    "file://",
]


@pytest.mark.parametrize("address", SCRIPTS)
def test_a_script_as_source_url_is_dropped_and_the_document_accepted(address: str) -> None:
    arrival = read(upsert(source_url=address))
    assert arrival.fields is not None
    assert (arrival.fields.source_url, arrival.has_lost_its_address) == (None, True)


@pytest.mark.parametrize(
    "address",
    [
        "https://wiki.example.org/a?b=c#d",
        "HTTP://x",
        "file:///srv/a%20b.pdf",
        "file://localhost/a.md",
        "file:///C:/a.md",
        None,
    ],
)
def test_a_source_url_that_a_person_can_open_is_preserved(address: str | None) -> None:
    arrival = read(upsert(source_url=address))
    assert arrival.fields is not None
    assert (arrival.fields.source_url, arrival.has_lost_its_address) == (address, False)


def test_what_is_hidden_in_a_source_url_is_encoded() -> None:
    """It led to the same page, and carried letters that only models read, or was shown reversed."""
    hidden = "".join(chr(0xE0000 + ord(letter)) for letter in "ob")
    arrival = read(upsert(source_url=f"https://wiki.example.org/\u0645\u06cc\u200c\u202e{hidden}"))
    assert arrival.fields is not None
    assert (
        arrival.fields.source_url == "https://wiki.example.org/\u0645\u06cc%E2%80%8C%E2%80%AE%F3%A0%81%AF%F3%A0%81%A2"
    )
    assert not arrival.has_lost_its_address


def test_no_character_that_is_not_displayed_is_left_in_a_source_url() -> None:
    """Fillers, selectors and musical controls were left: people see another address than models."""
    every = "".join(chr(n) for n in range(0x80, sys.maxunicode + 1) if not 0xD800 <= n < 0xE000)
    for hidden in regex.findall(r"[\p{Default_Ignorable_Code_Point}\p{Cc}\u2028\u2029\ufff9-\ufffb]", every):
        address = openable(f"https://wiki.example.org/{hidden}")
        assert address == f"https://wiki.example.org/{quote(hidden)}", ascii(hidden)


def test_titles_and_authors_are_accepted_without_hidden_and_direction_characters() -> None:
    """A title that ends in exe.fdp was shown as one that ends in pdf.exe, and could carry letters that only models
    read."""
    hidden = "".join(chr(0xE0000 + ord(letter)) for letter in "obey")
    arrival = read(upsert(title=f"Report \u202efdp.exe{hidden}\x00", author="Ann\u200b Archer\u2066"))
    assert arrival.fields is not None
    assert (arrival.fields.title, arrival.fields.author) == ("Report fdp.exe", "Ann Archer")


def test_a_stored_script_as_source_url_is_not_shown() -> None:
    one, other = uuid4(), uuid4()
    assert Passage(one, other, "d", "s", "T", "javascript:alert(1)", 0).source_url is None
    whole = Document(other, "d", "s", "T", "javascript:alert(1)", None, None, None, "text")
    assert whole.source_url is None

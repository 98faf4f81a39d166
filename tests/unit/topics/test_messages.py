"""The codec's laws: what is written can be read, what cannot be read says why, and no error quotes content."""

from __future__ import annotations

import json
import math
import sys
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from topics.codec import BadMessage, decode, encode, header_map
from topics.messages import (
    INT64_MAX,
    MAX_CONTENT_BYTES,
    MAX_METADATA_BYTES,
    MAX_PAIR_BYTES,
    MAX_PAIRS,
    MAX_PAIRS_BYTES,
    MESSAGES,
    AccessChanged,
    AnyMessage,
    ConversationForgotten,
    ConversationRecorded,
    DocumentDeleted,
    DocumentIndexed,
    DocumentUpserted,
    IdentityChanged,
    IndexHint,
    Pair,
)
from topics.registry import COPARTITIONED, TOPICS, Topic

CANARY = "canary-7f3a"
UPSERT: dict[str, Any] = {
    "tenant": "t",
    "source": "s",
    "external_id": "a.md",
    "observed_at": "2026-01-01T00:00:00Z",
    "version": 1,
    "title": "A",
    "content": "text",
    "acl_tags": ["all"],
}


def ce_type(kind: str = "document.upserted.v1") -> list[tuple[str, bytes]]:
    return [("ce_type", f"io.penstock.{kind}".encode())]


def refusal(value: bytes | None, headers: list[tuple[str, bytes]] | None = None) -> BadMessage:
    with pytest.raises(BadMessage) as raised:
        decode(value, ce_type() if headers is None else headers)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) <= 500
    return raised.value


def attempt(value: bytes, kind: str = "document.upserted.v1") -> AnyMessage | BadMessage:
    try:
        return decode(value, ce_type(kind))
    except BadMessage as error:
        return error


def refused(**fields: Any) -> str:
    """Why an upsert with these fields is refused; in the code that makes one as on the wire."""
    with pytest.raises(ValidationError):
        DocumentUpserted(**UPSERT | fields)
    error = refusal(json.dumps(UPSERT | fields).encode())
    assert error.code == "invalid"
    return str(error)


# --- round trip -----------------------------------------------------------------------------------------------------

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=60)
segments = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00/"), min_size=1, max_size=20)
names = words.filter(bool)
moments = st.datetimes(
    min_value=datetime(2, 1, 2),
    max_value=datetime(9998, 12, 30),
    timezones=st.sampled_from([UTC, timezone(timedelta(hours=14)), timezone(timedelta(hours=-12, minutes=30))]),
)
tags = st.lists(names, max_size=5)
versions = st.integers(0, INT64_MAX)
scalars = st.one_of(
    words, st.booleans(), st.integers(-INT64_MAX, INT64_MAX), st.floats(allow_nan=False, allow_infinity=False)
)
metadata = st.dictionaries(names, st.one_of(scalars, st.none(), st.lists(scalars, max_size=4)), max_size=5)
common = {"tenant": segments, "source": segments, "observed_at": moments}
document = {**common, "external_id": names}
messages: st.SearchStrategy[AnyMessage] = st.one_of(
    st.builds(
        DocumentUpserted,
        **document,
        version=versions,
        title=words,
        content=words,
        media_type=words,
        acl_tags=tags,
        required_tags=tags,
        source_url=st.none() | words,
        author=st.none() | words,
        source_modified_at=st.none() | moments,
        metadata=metadata,
    ),
    st.builds(DocumentDeleted, **document, version=versions),
    st.builds(AccessChanged, **document, acl_tags=tags, required_tags=tags),
    st.builds(IdentityChanged, **common, principal=names, groups=tags),
    st.builds(IndexHint, **document, document_id=names, generation=names),
    st.builds(
        DocumentIndexed,
        **document,
        document_id=names,
        seq=versions,
        version=st.none() | versions,
        state=st.sampled_from(["searchable", "partial", "retired", "revoked"]),
        generation=names,
        chunks=st.integers(0, 10**6),
    ),
    st.builds(
        ConversationRecorded,
        **common,
        member=segments,
        conversation=names,
        pairs=st.lists(
            st.builds(Pair, question=names, answer=words, asked_at=moments, id=st.none() | words),
            min_size=1,
            max_size=4,
        ),
    ),
    st.builds(ConversationForgotten, **common, member=segments, conversation=st.none() | names),
)


@given(messages)
def test_an_encoded_message_is_decoded_unchanged(message: AnyMessage) -> None:
    record = encode(message)
    read = decode(record.value, record.headers)
    assert read == message
    assert type(read) is type(message)
    assert encode(read) == record  # the same message, the same bytes, the same ce_id
    assert record.key.decode() == message.key


@given(messages)
def test_message_headers_follow_cloudevents(message: AnyMessage) -> None:
    headers = {name: value.decode() for name, value in encode(message, traceparent="00-a-b-01").headers}
    assert headers["ce_specversion"] == "1.0"
    assert headers["ce_type"].removeprefix("io.penstock.") in MESSAGES
    assert datetime.fromisoformat(headers["ce_time"]) == message.observed_at
    assert headers["ce_source"] == f"/{quote(message.tenant)}/{quote(message.source)}"
    assert headers["content-type"] == "application/json"
    assert headers["traceparent"] == "00-a-b-01"
    assert "traceparent" not in dict(encode(message).headers)


@given(messages, messages)
def test_ce_ids_are_equal_only_for_equal_messages(one: AnyMessage, other: AnyMessage) -> None:
    same = dict(encode(one).headers)["ce_id"] == dict(encode(other).headers)["ce_id"]
    assert same == (type(one) is type(other) and one.model_dump_json() == other.model_dump_json())


@given(st.binary(max_size=200), st.sampled_from(sorted(MESSAGES)))
def test_any_bytes_are_decoded_or_rejected_as_invalid(value: bytes, kind: str) -> None:
    result = attempt(value, kind)
    assert (result.code == "invalid") if isinstance(result, BadMessage) else (result.kind == kind)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_every_decoding_error_has_its_code() -> None:
    assert refusal(None).code == "no_value"
    assert refusal(b"{}", []).code == "unknown_type"
    assert refusal(b"{}", [("ce_type", b"io.penstock.document.upserted.v2")]).code == "unknown_type"
    assert refusal(b"{}", [("ce_type", b"\xff\xfe" * 1_000)]).code == "unknown_type"
    for value in (b"", b"[]", b"null", b"{", b"\xff", b'{"tenant": NaN}', b'{"a":' * 50_000, b"{}"):
        assert refusal(value).code == "invalid"


def test_headers_are_accepted_in_any_shape() -> None:
    assert header_map(None) == {}
    assert header_map({"a": b"1"}) == {"a": b"1"}
    assert header_map([("a", b"1"), ("a", b"2")]) == {"a": b"2"}
    assert refusal(b"{}", []).code == "unknown_type"
    assert decode(json.dumps(UPSERT).encode(), dict(ce_type())).key == "t/s/a.md"


@pytest.mark.parametrize("field", sorted(UPSERT))
def test_a_missing_field_is_named_in_the_error(field: str) -> None:
    value = {name: given for name, given in UPSERT.items() if name != field}
    assert str(refusal(json.dumps(value).encode())) == f"{field}: Field required"


@pytest.mark.parametrize(
    "field", [*sorted(UPSERT), "required_tags", "author", "source_url", "media_type", "source_modified_at", "metadata"]
)
@pytest.mark.parametrize(
    "wrong",
    [
        {CANARY: CANARY},
        [{CANARY: CANARY}],
        {CANARY: {CANARY: 1}},
        {CANARY: [[CANARY]]},
        CANARY + "\x00/" + "9" * 9_000,
        {CANARY * 1_000: 1},
        {CANARY: math.inf},
        {CANARY: "x" * MAX_METADATA_BYTES},
    ],
    ids=["object", "list", "nested", "nested list", "text", "long name", "infinite", "large"],
)
def test_decoding_errors_do_not_quote_content(field: str, wrong: object) -> None:
    result = attempt(json.dumps(UPSERT | {field: wrong}).encode())
    if isinstance(result, BadMessage):
        assert CANARY not in str(result)
        assert str(result).startswith((f"{field}:", "message: Invalid JSON"))
    else:  # text where text may be, and metadata that is no more than odd
        assert field in ("title", "content", "author", "acl_tags", "required_tags", "metadata")


def test_times_without_an_offset_are_rejected() -> None:
    for moment in (
        "2026-01-01T00:00:00",
        "2026-01-01",
        "yesterday",
        "1767225600",
        1_767_225_600,
        "0001-01-01T00:00:00Z",
        "9999-12-31T23:00:00-08:00",
    ):
        assert refused(observed_at=moment).startswith("observed_at: ")
        assert refused(source_modified_at=moment).startswith("source_modified_at: ")
    assert "timezone" in refused(observed_at="2026-01-01T00:00:00")
    read = DocumentUpserted(**UPSERT | {"observed_at": "2026-01-01T01:30:00+01:30"})
    assert read.observed_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert read.observed_at.utcoffset() == timedelta(0)


@pytest.mark.parametrize("surrogate", ["\ud83d", "a\udcff", "\udc00\ud800"])
def test_lone_surrogates_are_rejected(surrogate: str) -> None:
    for field in ("content", "title", "author", "source_url", "media_type", "external_id", "tenant"):
        refused(**{field: surrogate})
    refused(acl_tags=[surrogate])
    refused(metadata={"a": surrogate})
    refused(metadata={"a": [surrogate]})
    refused(metadata={surrogate: "a"})


def test_content_size_has_an_exact_limit() -> None:
    for text in ("a" * MAX_CONTENT_BYTES, "ü" * (MAX_CONTENT_BYTES // 2), "🏖" * (MAX_CONTENT_BYTES // 4)):
        message = DocumentUpserted(**UPSERT | {"content": text})
        record = encode(message)
        assert decode(record.value, record.headers) == message
        assert refused(content=text + "b") == (
            f"content: Value error, is {MAX_CONTENT_BYTES + 1} bytes, the limit is {MAX_CONTENT_BYTES}"
        )


def test_nul_is_dropped_from_text_and_rejected_in_names() -> None:
    read = DocumentUpserted(
        **UPSERT | {"content": "a\x00b", "title": "\x00", "author": "A\x00", "metadata": {"a": "\x00b"}}
    )
    assert (read.content, read.title, read.author, read.metadata) == ("ab", "", "A", {"a": "b"})
    for field in ("tenant", "source", "external_id"):
        assert refused(**{field: "a\x00b"}).startswith(f"{field}: ")
    assert refused(acl_tags=["a\x00"]).startswith("acl_tags: ")
    assert "U+0000" in refused(metadata={"a\x00": 1})


def test_slashes_in_tenant_and_source_are_rejected() -> None:
    for field in ("tenant", "source"):
        for wrong in ("a/b", "/", "", "x" * 201):
            assert refused(**{field: wrong}).startswith(f"{field}: ")
    assert DocumentUpserted(**UPSERT | {"external_id": "a/b/c"}).key == "t/s/a/b/c"


@given(st.lists(names, max_size=30))
def test_tags_are_sorted_and_unique(tags: list[str]) -> None:
    expected = sorted(set(tags))
    for cls in (DocumentUpserted, AccessChanged):
        read = cls(**UPSERT | {"acl_tags": tags, "required_tags": tags})
        assert (read.acl_tags, read.required_tags) == (expected, expected)
    left = IdentityChanged(
        tenant="t", source="s", observed_at=datetime(2026, 1, 1, tzinfo=UTC), principal="p", groups=tags
    )
    assert left.groups == expected


def test_access_tags_are_limited_in_number_and_length() -> None:
    for wrong in ([""], ["x" * 501], [str(n) for n in range(1_001)], [1], "all", None):
        assert refused(acl_tags=wrong).startswith("acl_tags: ")


def test_nested_metadata_is_rejected() -> None:
    for wrong in ({"a": {"b": 1}}, {"a": [{"b": 1}]}, {"a": [[1]]}, {"a": [None]}):
        assert refused(metadata=wrong).startswith("metadata: Value error, is not flat")
    for wrong in ({"": 1}, {"x" * 201: 1}, {"a": 2**63}, {"a": [-(2**63)]}, {"a": math.nan}, {"a": [math.inf]}, [], 1):
        refused(metadata=wrong)


def test_metadata_size_has_an_exact_limit() -> None:
    room = MAX_METADATA_BYTES - len('{"a": ""}')
    assert DocumentUpserted(**UPSERT | {"metadata": {"a": "x" * room}}).metadata == {"a": "x" * room}
    assert refused(metadata={"a": "x" * (room + 1)}).endswith(
        f"is {MAX_METADATA_BYTES + 1} bytes of JSON, the limit is {MAX_METADATA_BYTES}"
    )


@pytest.mark.parametrize("values", [dict.fromkeys(map(str, range(40_000)), 1), {"a": [1] * 40_000}])
def test_metadata_of_very_many_values_is_refused_before_each_is_looked_into(values: Any) -> None:
    """A record of 25 MB took detect ten seconds and a gigabyte."""
    assert refused(metadata=values).startswith("metadata: Value error, has too many values")


def test_metadata_values_keep_their_types() -> None:
    kept = {"true": True, "one": 1, "float": 1.0, "text": "1", "null": None, "list": [True, 1, 1.5, "1"]}
    record = encode(DocumentUpserted(**UPSERT | {"metadata": kept}))
    read = decode(record.value, record.headers)
    assert isinstance(read, DocumentUpserted)
    assert repr(read.metadata) == repr(kept)


def test_versions_are_limited_to_64_bits() -> None:
    assert DocumentUpserted(**UPSERT | {"version": INT64_MAX}).version == INT64_MAX
    assert DocumentUpserted(**UPSERT | {"version": str(INT64_MAX)}).version == INT64_MAX
    for wrong in (-1, INT64_MAX + 1, 1.5, "1.5", "v1", None):
        assert refused(version=wrong).startswith("version: ")


def test_a_field_named_kind_does_not_determine_the_message_type() -> None:
    read = decode(json.dumps(UPSERT | {"kind": "document.deleted.v1"}).encode(), ce_type())
    assert isinstance(read, DocumentUpserted)


# --- topics ---------------------------------------------------------------------------------------------------------


def test_every_message_type_has_a_topic_and_every_topic_holds_known_types() -> None:
    assert {kind for topic in TOPICS for kind in topic.holds} == set(MESSAGES)
    assert len({topic.name for topic in TOPICS}) == len(TOPICS)


def test_lanes_that_share_workers_are_copartitioned() -> None:
    for value, other in COPARTITIONED:
        assert value.partitions == other.partitions
        assert value.holds == other.holds


def test_topic_settings_are_translated_to_kafka_configs() -> None:
    kept = Topic("a", (), "x", retention_ms=5, max_message_bytes=7, settings={"segment.ms": "9"})
    assert kept.configs(replication=3) == {
        "cleanup.policy": "delete",
        "retention.ms": "5",
        "max.message.bytes": "7",
        "min.insync.replicas": "2",
        "segment.ms": "9",
    }
    assert kept.configs(replication=1)["min.insync.replicas"] == "1"
    compacted = Topic("a", (), "x", cleanup="compact").configs(replication=1)
    assert (compacted["cleanup.policy"], compacted["retention.ms"]) == ("compact", "-1")


def test_the_largest_document_fits_its_topic() -> None:
    """Control characters swell most in JSON: six bytes each. Nothing of ours ever needs more than the topic takes."""
    worst = DocumentUpserted(
        **UPSERT
        | {
            "content": "\x01" * MAX_CONTENT_BYTES,
            "title": "\x01" * 4_000,
            "source_url": "\x01" * 8_000,
            "external_id": "\x01" * 2_000,
            "acl_tags": [chr(0x10000 + n) * 100 for n in range(1_000)],
            "metadata": {"a": "\x01" * 10_000},
        }
    )
    largest = max(topic.max_message_bytes for topic in TOPICS if "document.upserted.v1" in topic.holds)
    record = encode(worst)
    assert sys.getsizeof(record.value) + len(record.key) < largest


def recorded(*pairs: Pair, **fields: Any) -> ConversationRecorded:
    base = {"tenant": "t", "source": "s", "observed_at": "2026-01-01T00:00:00Z", "member": "ada", "conversation": "c"}
    return ConversationRecorded(**base | fields, pairs=list(pairs))


def pair(question: str, answer: str = "") -> Pair:
    return Pair.model_validate({"question": question, "answer": answer, "asked_at": "2026-01-01T00:00:00Z"})


def test_the_largest_conversation_fits_its_topic_and_a_larger_one_is_rejected() -> None:
    size = MAX_PAIRS_BYTES // MAX_PAIRS
    worst = [pair("\x01", "\x01" * (size - 1)).model_copy(update={"id": "\x01" * 500}) for _ in range(MAX_PAIRS)]
    message = recorded(*worst, member="\x01" * 500, conversation="\x01" * 500)
    topic = next(topic for topic in TOPICS if message.kind in topic.holds)
    assert len(encode(message).value) < topic.max_message_bytes
    pair("q" * MAX_PAIR_BYTES)
    for question, answer in (("q" * MAX_PAIR_BYTES, "a"), ("ß" * (MAX_PAIR_BYTES // 2), "a"), ("", "a")):
        with pytest.raises(ValidationError):
            pair(question, answer)
    full = pair("q" * MAX_PAIR_BYTES)
    recorded(*[full] * 16)
    for pairs in ([full] * 17, [pair("q")] * (MAX_PAIRS + 1), []):
        with pytest.raises(ValidationError):
            recorded(*pairs)


def test_conversations_of_one_member_share_a_key_unique_to_that_member() -> None:
    one, other = recorded(pair("q")), recorded(pair("q"), source="other", conversation="d/e")
    forgotten = ConversationForgotten(tenant="t", source="s", observed_at=one.observed_at, member="ada")
    assert one.key == other.key == forgotten.key == "t/ada"
    for fields in ({"member": "x/ada"}, {"tenant": "t/x"}, {"member": ""}):
        with pytest.raises(ValidationError):
            recorded(pair("q"), **fields)

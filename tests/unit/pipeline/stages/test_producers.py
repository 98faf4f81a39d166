"""Rights of producers: signatures of records, patterns, and the time in which a key is valid."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import process_time

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import Misconfigured
from pipeline.core.producers import CODES, Key, Producer, Registry, Term, Unauthorised, is_allowed, is_pattern
from pipeline.kafka.client import publisher, signature_of
from pipeline.runtime.settings import KafkaSettings, Settings
from pipeline.stages.admission import verified
from pipeline.stages.stage import Incoming
from topics.codec import Headers
from topics.signatures import HEADER, NotAKey, Signer, is_valid, key_id, new_private_key, public_key_of, signing_input

NOW = datetime(2026, 11, 1, tzinfo=UTC)
MIGRATIONS = Path(__file__).parents[4] / "pipeline" / "stores" / "migrations"
PEM = new_private_key()
SIGNER = Signer(PEM)
TYPE: Headers = [("ce_type", b"io.penstock.document.deleted.v1")]
LIVE, BACKFILL, IDENTITIES = "p.documents.live.v1", "p.documents.backfill.v1", "p.identities.v1"
OF_ORDER_8 = "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"
ALSO_OF_ORDER_8 = "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"
KEY, VALUE = b"acme/wiki/a.md", b'{"tenant": "acme"}'


def registry(
    *, since: timedelta = -timedelta(days=1), until: timedelta | None = None, key_until: timedelta | None = None
) -> Registry:
    term = Term(NOW + since, NOW + until if until else None)
    key = Key(SIGNER.key_id, "wiki", public_key_of(PEM), Term(NOW + since, NOW + key_until if key_until else None))
    return Registry({"wiki": Producer("wiki", ("acme/wiki",), term)}, {key.key_id: key})


def record(topic: str, headers: Headers, key: bytes | None = KEY, value: bytes | None = VALUE) -> Incoming:
    return Incoming(topic, 0, 0, key, value, headers, "live")


def signed(topic: str = LIVE) -> Headers:
    return SIGNER.headers(topic, KEY, VALUE, TYPE)


def code(incoming: Incoming, known: Registry | None = None) -> str:
    with pytest.raises(Unauthorised) as refused:
        verified(known or registry(), incoming, NOW)
    return refused.value.code


def test_a_signed_record_is_attributed_to_its_producer() -> None:
    assert verified(registry(), record(LIVE, signed()), NOW) == "wiki"


def test_a_live_record_moved_to_the_backfill_topic_keeps_a_valid_signature() -> None:
    assert verified(registry(), record(BACKFILL, signed(LIVE)), NOW) == "wiki"
    assert verified(registry(), record(BACKFILL, signed(BACKFILL)), NOW) == "wiki"


@pytest.mark.parametrize(
    "incoming",
    [
        record(IDENTITIES, signed(LIVE)),
        record(LIVE, signed(BACKFILL)),
        record("other.documents.live.v1", signed(LIVE)),
        record(LIVE, signed(), key=b"acme/hr/a.md"),
        record(LIVE, signed(), value=VALUE + b" "),
        record(LIVE, signed(), value=None),
        record(LIVE, [*signed(), ("ce_type", b"io.penstock.document.upserted.v1")]),
    ],
    ids=[
        "another topic",
        "from backfill to live",
        "another installation",
        "another key",
        "another value",
        "no value",
        "another type behind the first",
    ],
)
def test_a_signature_is_invalid_on_any_other_record(incoming: Incoming) -> None:
    assert code(incoming) == "bad_signature"


@pytest.mark.parametrize(
    "value", [b"", b"v1", b"v2:a:b", b"v1:a:not base64!", b"\xff\xfe", b"v1:a:" + b"A" * 88 + b":more"]
)
def test_a_record_with_an_unreadable_signature_header_is_unsigned(value: bytes) -> None:
    assert code(record(LIVE, [*TYPE, (HEADER, value)])) == "unsigned"
    assert code(record(LIVE, TYPE)) == "unsigned"


def test_the_last_of_two_signature_headers_counts() -> None:
    [*_, genuine] = signed()
    forged = (HEADER, f"v1:{SIGNER.key_id}:{base64.b64encode(bytes(64)).decode()}".encode())
    assert verified(registry(), record(LIVE, [*TYPE, forged, genuine]), NOW) == "wiki"
    assert code(record(LIVE, [*TYPE, genuine, forged])) == "bad_signature"


def test_a_signature_of_the_wrong_length_is_rejected_without_an_error() -> None:
    for size in (0, 1, 63, 65, 500):
        header = (HEADER, f"v1:{SIGNER.key_id}:{base64.b64encode(bytes(size)).decode()}".encode())
        assert code(record(LIVE, [*TYPE, header])) == "bad_signature"


def test_a_key_is_accepted_only_while_it_is_in_force() -> None:
    incoming = record(LIVE, signed())
    assert code(incoming, registry(until=timedelta(0) - timedelta(seconds=1))) == "key_not_in_force"
    assert code(incoming, registry(key_until=-timedelta(seconds=1))) == "key_not_in_force"
    assert code(incoming, registry(since=timedelta(seconds=1))) == "key_not_in_force"
    assert code(incoming, Registry({}, {})) == "unknown_key"
    assert verified(registry(key_until=timedelta(seconds=1)), incoming, NOW) == "wiki"


@pytest.mark.parametrize(
    ("pattern", "tenant", "source", "allowed"),
    [
        ("acme/wiki", "acme", "wiki", True),
        ("acme/wiki", "acme", "wiki2", False),
        ("acme/wiki", "ACME", "wiki", False),
        ("acme/wiki", "acme2", "wiki", False),
        ("acme/*", "acme", "anything\nat all", True),
        ("acme/*", "globex", "wiki", False),
        ("acme/wiki-*", "acme", "wiki-hr", True),
        ("acme/wiki-*", "acme", "hr-wiki-", False),
        ("*/wiki", "globex", "wiki", True),
        ("acme/w.ki", "acme", "wiki", False),
        ("acme/*", "acme", "canary.wiki", False),
        ("*/*", "acme", "canary.wiki", False),
        ("*/canary.*", "acme", "canary.wiki", True),
        ("*/canary.*", "acme", "wiki", False),
    ],
)
def test_source_patterns_match_tenant_and_source(pattern: str, tenant: str, source: str, allowed: bool) -> None:
    assert is_pattern(pattern)
    assert is_allowed([pattern], tenant, source) is allowed


@given(st.text(min_size=1).filter(lambda name: "*" not in name), st.text(min_size=1), st.text(min_size=1))
def test_a_source_pattern_without_a_star_allows_only_that_source(source: str, tenant: str, other: str) -> None:
    assert is_allowed(["acme/" + source.replace("/", "")], tenant, other) is (
        (tenant, other) == ("acme", source.replace("/", ""))
    )


@given(st.text("ab*", min_size=1, max_size=8), st.text("ab\n", min_size=1, max_size=12))
def test_a_star_in_a_source_pattern_stands_for_any_characters(part: str, name: str) -> None:
    expected = re.fullmatch(".*".join(map(re.escape, part.split("*"))), name, re.DOTALL) is not None
    assert is_allowed([f"acme/{part}"], "acme", name) is expected
    assert is_allowed([f"{part}/wiki"], name, "wiki") is expected


def test_a_source_pattern_with_many_stars_is_matched_quickly() -> None:
    """A regular expression takes minutes for this name, and detect waits for it."""
    began = process_time()
    assert not is_allowed(["acme/" + 8 * "a*" + "b"], "acme", 500 * "a")
    assert process_time() - began < 1


@pytest.mark.parametrize("pattern", ["", "acme", "/wiki", "acme/", "acme/wiki/a", "a\x00/b"])
def test_invalid_source_patterns_are_rejected(pattern: str) -> None:
    assert not is_pattern(pattern)


def test_tenant_wide_events_require_permission_for_all_sources_of_the_tenant() -> None:
    def allowed(*patterns: str) -> bool:
        known = Registry({"p": Producer("p", patterns, Term(NOW, None))}, {})
        try:
            known.authorise_tenant("p", "acme")
        except Unauthorised:
            return False
        return True

    assert allowed("acme/*")
    assert allowed("globex/wiki", "*/*")
    assert not allowed("acme/wiki", "acme/chat")
    assert not allowed("globex/*")


def test_dead_letters_of_every_signature_refusal_code_are_left_out_of_the_ledgers_views() -> None:
    migration = (MIGRATIONS / "0042_forged_letters.sql").read_text()
    assert re.findall(r"l\.code <> ALL \('\{(.*)\}'\)", migration) == [",".join(CODES)] * 3


def test_the_signing_input_has_the_documented_format() -> None:
    """docs/wire.md shows it: what is changed here breaks every producer there is."""
    assert signing_input("documents.live.v1", b"io.penstock.document.deleted.v1", b"acme/wiki/a.md", b"{}") == (
        b"penstock-signature-v1\n"
        b"documents.live.v1\n"
        b"io.penstock.document.deleted.v1\n"
        b"0e66635ef91c83c8ae94b408c4e69ba74f2aeee5f799269217c71a729d9c6875\n"
        b"44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    )


@pytest.mark.parametrize("missing", ["key", "value"])
def test_a_signature_distinguishes_an_empty_key_or_value_from_a_missing_one(missing: str) -> None:
    empty, absent = {missing: b""}, {missing: None}
    for signs, carries in ((empty, absent), (absent, empty)):
        parts = {"key": b"acme/wiki/ann", "value": VALUE}
        headers = SIGNER.headers(IDENTITIES, **{**parts, **signs}, headers=TYPE)  # type: ignore[arg-type]
        assert code(record(IDENTITIES, headers, **{**parts, **carries})) == "bad_signature"  # type: ignore[arg-type]
        assert verified(registry(), record(IDENTITIES, headers, **{**parts, **signs}), NOW) == "wiki"  # type: ignore[arg-type]


def test_a_key_id_is_derived_from_the_public_key() -> None:
    assert SIGNER.key_id == key_id(public_key_of(PEM))
    assert len(SIGNER.key_id) == 32


@pytest.mark.parametrize(
    "y",
    [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18]
    + [int.from_bytes(bytes.fromhex(y), "little") for y in (OF_ORDER_8, ALSO_OF_ORDER_8)],
)
def test_a_degenerate_public_key_cannot_be_enrolled(y: int) -> None:
    for sign in (0, 2**255):
        key = Ed25519PublicKey.from_public_bytes((y | sign).to_bytes(32, "little"))
        pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        with pytest.raises(NotAKey, match="degenerate"):
            public_key_of(pem)


def test_anybody_can_make_signatures_for_a_degenerate_public_key() -> None:
    """Such a key is refused because one signature with the point of order 1 is valid for every message."""
    point = (1).to_bytes(32, "little")
    assert is_valid(point, point + bytes(32), [LIVE], KEY, VALUE, TYPE)
    assert is_valid(point, point + bytes(32), [IDENTITIES], b"acme/wiki/ann", None, TYPE)


def test_a_file_that_is_not_a_signing_key_is_rejected_without_being_quoted(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for pem in (b"", b"secret-canary", other):
        with pytest.raises(NotAKey) as refused:
            public_key_of(pem)
        assert "canary" not in str(refused.value)
        (tmp_path / "key.pem").write_bytes(pem)
        with pytest.raises(Misconfigured, match="PENSTOCK_KAFKA_SIGNING_KEY_FILE"):
            signature_of(KafkaSettings(signing_key_file=str(tmp_path / "key.pem")))
    with pytest.raises(Misconfigured, match="no such file"):
        signature_of(KafkaSettings(signing_key_file=str(tmp_path / "none.pem")))
    assert signature_of(KafkaSettings()) is None


def test_a_publisher_without_a_signing_key_does_not_start_when_signatures_are_enforced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipeline.runtime.settings import load

    monkeypatch.setenv("PENSTOCK_PRODUCERS", "enforce")
    settings: Settings = load()
    assert settings.producers == "enforce"
    with pytest.raises(Misconfigured, match="PENSTOCK_KAFKA_SIGNING_KEY_FILE"):
        publisher(settings)

"""Producers: real workers refuse records that no enrolled producer has signed, and the real command enrols
producers."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import product
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from typer.testing import CliRunner, Result

from cli.main import app
from pipeline.core.errors import PenstockError
from pipeline.kafka.client import deliver, producer
from pipeline.kafka.stopping import stop_consumer
from pipeline.ledger import producers
from pipeline.stages.identities import TOMBSTONE
from pipeline.stores.postgres import open_pool
from query.access.callers import identify, readable
from tests.e2e.test_cli import answer, run, search_ids
from tests.e2e.test_dead import metric
from tests.e2e.test_stream import document
from tests.support.pipeline import hostile_batches
from tests.support.pipeline.hostile_batches import batch, record
from tests.support.space import PROJECT, Space, now
from topics.codec import Headers
from topics.messages import AccessChanged, AnyMessage, ConversationForgotten, IdentityChanged
from topics.registry import (
    CONVERSATIONS,
    DOCUMENTS_BACKFILL,
    DOCUMENTS_LIVE,
    IDENTITIES,
    MAX_MESSAGE_BYTES,
    Topic,
)
from topics.signatures import key_id, new_private_key, public_key_of

pytestmark = pytest.mark.stack

ENFORCE = {"PENSTOCK_PRODUCERS": "enforce"}
FORGED, SPACES = 600, 8
BOMB_BYTES, LARGE = 2**29, 48
MEMORY_BYTES = 900 * 2**20
"""Less than the limit of detect's container in deploy/kubernetes, and than two bombs or the large records together."""


async def enrol(space: Space, name: str, *allow: str, until: datetime | None = None) -> Path:
    """A producer of that name; returns its private key's file."""
    file = space.home / f"{name}.pem"
    file.write_bytes(new_private_key())
    public = public_key_of(file.read_bytes())
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        await producers.add(connection, name, allow, key_id(public), public, since=None, until=until)
    return file


async def publish(space: Space, key: Path | None, topic: Topic, *messages: AnyMessage) -> None:
    """Signed with a key, or not at all."""
    kafka = space.settings.kafka.model_copy(update={"signing_key_file": str(key) if key else None})
    async with producer(kafka) as sender:
        await deliver([sender.send(topic, message) for message in messages])


async def records(space: Space, topic: Topic) -> list[tuple[bytes, bytes, Headers]]:
    """All that stand on a topic, as somebody who may read it copies them."""
    name = f"{space.settings.kafka.topic_prefix}{topic.name}"
    consumer = AIOKafkaConsumer(bootstrap_servers=space.settings.kafka.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        places = [TopicPartition(name, number) for number in range(topic.partitions)]
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        consumed = [await consumer.getone() for _ in range(sum(ends.values()))]
    finally:
        await stop_consumer(consumer)
    return [(record.key, record.value, list(record.headers)) for record in consumed]


async def principals_with_access(space: Space, principals: Sequence[str]) -> list[str]:
    """Those of them who may read some document of the tenant acme."""
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        callers = {name: await identify(connection, "acme", principals=[name]) for name in principals}
        return [name for name, caller in callers.items() if (await readable(connection, caller)).access_ids]


async def codes(space: Space) -> dict[str, int]:
    return dict(await space.query("SELECT code, count(*) FROM dead_letters GROUP BY 1"))


def identity(principal: str, groups: list[str], **fields: object) -> IdentityChanged:
    return IdentityChanged(
        **{"tenant": "acme", "source": "wiki", "principal": principal, "groups": groups, "observed_at": now(), **fields}  # type: ignore[arg-type]
    )


def access(name: str, tags: list[str]) -> AccessChanged:
    return AccessChanged(tenant="acme", source="wiki", external_id=name, observed_at=now(), acl_tags=tags)


async def attack(space: Space, stranger: Path, partner: Path) -> int:
    """All that whoever may write the topics can try without the wiki's key; returns how many records that are."""
    tries: list[tuple[Path | None, Topic, AnyMessage]] = [
        (key, topic, message)
        for key in (None, stranger, partner)
        for topic, message in (
            (IDENTITIES, identity("eve", ["board"])),
            (DOCUMENTS_LIVE, access("merger.md", ["board", "user:eve"])),
            (DOCUMENTS_BACKFILL, access("merger.md", ["board", "user:eve"])),
            (DOCUMENTS_LIVE, document("planted.md", "# Planted", acl_tags=["user:eve"])),
            (CONVERSATIONS, ConversationForgotten(tenant="acme", source="wiki", observed_at=now(), member="ann")),
        )
    ]
    for key, topic, message in tries:
        await publish(space, key, topic, message)
    return len(tries)


async def test_records_without_a_valid_signature_change_nothing_and_become_dead_letters(
    space: Space, tmp_path: Path
) -> None:
    wiki = await enrol(space, "wiki", "acme/wiki")
    partner = await enrol(space, "partner", "globex/*", "acme/shop")
    stranger = tmp_path / "stranger.pem"
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", stranger], check=True
    )  # as docs/wire.md says
    space.start("detect", env=ENFORCE)
    await publish(space, wiki, DOCUMENTS_LIVE, document("merger.md", "# Falcon", acl_tags=["board"]))
    await publish(space, wiki, IDENTITIES, identity("ann", ["board"]), identity("eve", []))
    await space.until("SELECT count(*) FROM memberships", 2)
    await space.until("SELECT count(*) FROM documents", 1)
    assert await principals_with_access(space, ["ann", "eve"]) == ["ann"]

    # Records of the wiki's own, on another topic, under another key and as another type.
    [genuine] = await records(space, DOCUMENTS_LIVE)
    [member, *_] = [record for record in await records(space, IDENTITIES) if record[0].endswith(b"ann")]
    async with producer(space.settings.kafka) as kafka:
        moved = [
            (DOCUMENTS_LIVE, b"acme/hr/merger.md", genuine[1], genuine[2]),
            (IDENTITIES, b"acme/wiki/eve", member[1].replace(b"ann", b"eve"), member[2]),
            (IDENTITIES, *genuine),
            (DOCUMENTS_LIVE, *genuine[:2], [*genuine[2], ("ce_type", b"io.penstock.document.deleted.v1")]),
        ]
        await deliver([kafka.send_raw(*name) for name in moved])
    tried = await attack(space, stranger, partner)
    await space.until("SELECT count(*) FROM dead_letters", tried + len(moved))
    assert await principals_with_access(space, ["ann", "eve"]) == ["ann"]
    assert await space.query("SELECT external_id FROM documents") == [("merger.md",)]
    assert await codes(space) == {
        "unsigned": tried // 3,
        "unknown_key": tried // 3,
        "not_allowed": tried // 3,
        "bad_signature": len(moved),
    }

    # The same record once more, where it belongs, is as harmless as ever; and its signer goes on.
    async with producer(space.settings.kafka) as kafka:
        await deliver([kafka.send_raw(DOCUMENTS_BACKFILL, *genuine)])
    await publish(space, wiki, DOCUMENTS_LIVE, access("merger.md", ["staff"]))
    await publish(space, wiki, IDENTITIES, identity("ann", []))
    await space.until("SELECT count(*) FROM memberships WHERE groups = '{}'", 2)
    await space.until("SELECT count(*) FROM access_sets WHERE acl_tags = '{wiki/staff}'", 1)
    assert sum((await codes(space)).values()) == tried + len(moved)


@pytest.mark.slow
async def test_a_tombstone_without_a_valid_signature_is_refused(space: Space, tmp_path: Path) -> None:
    """Only `penstock forget` takes a person's newest groups out of the compacted topic, and it signs."""
    wiki, partner = await enrol(space, "wiki", "acme/wiki"), await enrol(space, "partner", "globex/*")
    space.start("detect", env=ENFORCE)
    await publish(space, wiki, IDENTITIES, identity("ann", ["board"]))
    await space.until("SELECT count(*) FROM memberships", 1)
    [(key, _, signed)] = await records(space, IDENTITIES)
    tries: list[tuple[Path | None, bytes | None, Headers]] = [
        (None, None, [TOMBSTONE]),
        (partner, None, [TOMBSTONE]),
        (None, None, [*signed, TOMBSTONE]),
        (None, b"", [*signed, TOMBSTONE]),
    ]
    for signer, value, headers in tries:
        kafka = space.settings.kafka.model_copy(update={"signing_key_file": str(signer) if signer else None})
        async with producer(kafka) as sender:
            if signer is not None:
                await deliver([sender.send_tombstone(IDENTITIES, key, headers)])
            else:
                await deliver([sender.send_raw(IDENTITIES, key, value, headers)])
    await space.until("SELECT count(*) FROM dead_letters", len(tries))
    assert await codes(space) == {"unsigned": 1, "not_allowed": 1, "bad_signature": 2}
    async with producer(space.settings.kafka.model_copy(update={"signing_key_file": str(wiki)})) as sender:
        await deliver([sender.send_tombstone(IDENTITIES, key, [TOMBSTONE])])
    await publish(space, wiki, IDENTITIES, identity("bob", ["board"]))
    await space.until("SELECT count(*) FROM memberships", 2)
    assert sum((await codes(space)).values()) == len(tries)
    assert await space.query("SELECT groups FROM memberships WHERE principal = 'ann'") == [(["board"],)]


@pytest.mark.slow
async def test_without_enforcement_a_forged_membership_grants_access(space: Space, tmp_path: Path) -> None:
    """The attack of the test above succeeds if nothing is refused."""
    space.start("detect")
    await publish(space, None, DOCUMENTS_LIVE, document("merger.md", "# Falcon", acl_tags=["board"]))
    await space.until("SELECT count(*) FROM documents", 1)
    await publish(space, None, IDENTITIES, identity("eve", ["board"]))
    await space.until("SELECT count(*) FROM memberships", 1)
    assert await principals_with_access(space, ["eve"]) == ["eve"]


@pytest.mark.slow
async def test_a_group_named_like_a_users_own_tag_grants_no_access(space: Space) -> None:
    space.start("detect")
    await publish(space, None, DOCUMENTS_LIVE, document("private.md", "# Mine", acl_tags=["user:ann"]))
    await space.until("SELECT count(*) FROM documents", 1)
    await publish(space, None, IDENTITIES, identity("eve", ["user:ann"]), identity("bob", ["users:ann", "User:ann"]))
    await space.until("SELECT count(*) FROM memberships", 1)
    await space.until("SELECT count(*) FROM dead_letters", 1)
    assert await codes(space) == {"reserved_group": 1}
    assert await principals_with_access(space, ["ann", "bob", "eve"]) == ["ann"]


@pytest.mark.slow
async def test_removed_and_expired_keys_are_refused_and_rotated_ones_accepted_during_overlap(space: Space) -> None:
    old = await enrol(space, "wiki", "acme/wiki")
    gone = await enrol(space, "gone", "acme/*")
    ended = await enrol(space, "ended", "acme/*", until=now() - timedelta(seconds=1))
    space.start("detect", env=ENFORCE)
    await publish(space, gone, DOCUMENTS_LIVE, document("before.md", "# Before"))
    await space.until("SELECT count(*) FROM documents", 1)
    assert run(space, "producer", "remove", "gone").returncode == 0
    new = space.home / "wiki-2.pem"
    answer(space, "producer", "rotate", "wiki", "--key-file", str(new))
    await publish(space, ended, DOCUMENTS_LIVE, document("ended.md", "# Ended"))
    await publish(space, old, DOCUMENTS_LIVE, document("old.md", "# Old"))
    await publish(space, new, DOCUMENTS_LIVE, document("new.md", "# New"))  # enrolled while the worker runs
    await space.until("SELECT count(*) FROM documents", 3)
    await space.until("SELECT count(*) FROM dead_letters", 1)
    accepted = 3
    while True:  # at the latest two seconds after it was removed
        await publish(space, gone, DOCUMENTS_LIVE, document(f"after {accepted}.md", "# After"))
        done = "SELECT (SELECT count(*) FROM documents) + (SELECT count(*) FROM dead_letters)"
        await space.until(done, accepted + 2)
        if await space.query("SELECT count(*) FROM dead_letters") == [(2,)]:
            break
        accepted += 1
    assert await codes(space) == {"key_not_in_force": 2}
    answer(space, "producer", "rotate", "wiki", "--overlap-days", "0", "--key-file", str(space.home / "wiki-3.pem"))
    in_force = {
        entry["producer"]: [key["in_force"] for key in entry["keys"]] for entry in answer(space, "producer", "list")
    }
    assert in_force == {"wiki": [False, False, True]}


@pytest.mark.slow
async def test_unsigned_records_are_accepted_in_warn_mode_and_refused_in_enforce_mode(space: Space) -> None:
    wiki = await enrol(space, "wiki", "acme/wiki")
    space.start("detect", env={"PENSTOCK_PRODUCERS": "warn"})
    await publish(space, None, DOCUMENTS_LIVE, document("old.md", "# Unsigned"))
    await publish(space, wiki, DOCUMENTS_LIVE, document("signed.md", "# Signed"))
    await space.until("SELECT count(*) FROM documents", 2)
    labels = '{mode="warn",reason="unsigned",stage="detect"}'
    assert metric(space, f"penstock_unauthorised_records_total{labels}") == 1
    assert space.stop("detect") == 0

    await publish(space, None, DOCUMENTS_LIVE, document("late.md", "# Unsigned, and read after the switch"))
    space.start("detect", env=ENFORCE)
    await space.until("SELECT count(*) FROM dead_letters", 1)
    await publish(space, wiki, DOCUMENTS_LIVE, document("new.md", "# Signed"))
    await space.until("SELECT count(*) FROM documents", 3)
    assert await codes(space) == {"unsigned": 1}
    assert space.stop("detect") == 0

    space.start("detect", env={"PENSTOCK_PRODUCERS": "warn"})  # to take it in after all
    assert run(space, "dead", "replay", "--all", "--yes").returncode == 0
    await space.until("SELECT count(*) FROM documents", 4)


@pytest.mark.slow
async def test_records_signed_before_enrolment_are_replayed_without_the_private_key(space: Space) -> None:
    private, public = space.home / "p.pem", space.home / "p.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    space.environment["PENSTOCK_PRODUCERS"] = "enforce"
    space.start("detect")
    await publish(space, private, DOCUMENTS_LIVE, document("early.md", "# Early"))
    await publish(space, private, IDENTITIES, identity("ann", ["staff"]))
    await space.until("SELECT count(*) FROM dead_letters", 2)
    refused = run(space, "dead", "replay", "--all", "--yes")
    assert "it is still unknown_key" in refused.stderr, "a membership is not sent to a compacted topic in vain"
    await space.until("SELECT count(*) FROM dead_letters WHERE attempt = 2", 1)
    answer(space, "producer", "add", "wiki", "--allow", "acme/wiki", "--public-key", str(public))
    private.unlink()
    assert run(space, "dead", "replay", "--all", "--yes").returncode == 0
    await space.until("SELECT count(*) FROM documents", 1)
    await space.until("SELECT count(*) FROM memberships", 1)


@pytest.mark.slow
async def test_a_flood_of_forged_records_delays_no_signed_record_of_the_same_sources(space: Space) -> None:
    """They name the very sources whose revocations and memberships come behind them, while nobody else gets through."""
    wiki = await enrol(space, "wiki", "acme/*")
    space.start("detect", env={**ENFORCE, "PENSTOCK_STREAM_DEAD_LETTERS_PER_MINUTE": "5"})
    mine = [document(f"{n}.md", "# Mine", source=f"wiki-{n}") for n in range(SPACES)]
    async with producer(space.settings.kafka) as kafka:
        forged = [
            kafka.send(topic, message)
            for n in range(FORGED // 2)
            for topic, message in (
                (DOCUMENTS_LIVE, document(f"forged {n}.md", "# Forged", source=f"wiki-{n % SPACES}")),
                (IDENTITIES, identity(f"eve {n}", ["board"], source=f"wiki-{n % SPACES}")),
            )
        ]
        await deliver(forged)
    await publish(space, wiki, DOCUMENTS_LIVE, *mine)
    await publish(space, wiki, IDENTITIES, identity("ann", ["staff"], source="wiki-0"))
    await space.until("SELECT count(*) FROM documents", SPACES)
    await space.until("SELECT count(*) FROM memberships", 1)
    await space.until("SELECT count(*) FROM dead_letters WHERE code = 'unsigned'", FORGED)
    assert metric(space, "penstock_dead_letter_floods_total") == 0
    assert metric(space, "penstock_moved_poison_total") == 0


@pytest.mark.slow
async def test_batches_that_nobody_can_unpack_or_read_stop_no_revocation(space: Space) -> None:
    """A writer of the topic needs no key to put them there, and Kafka does not examine them."""
    wiki = await enrol(space, "wiki", "acme/*")
    space.start("detect", env=ENFORCE)
    await publish(space, wiki, DOCUMENTS_LIVE, document("merger.md", "# Falcon", acl_tags=["board"]))
    await publish(space, wiki, IDENTITIES, identity("ann", ["board"]))
    await space.until("SELECT count(*) FROM memberships", 1)
    await space.until("SELECT count(*) FROM documents", 1)
    hostile = hostile_batches.bomb(BOMB_BYTES), batch(record(0, b"x", header=b"\xff"))
    intake = DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, IDENTITIES, CONVERSATIONS
    kafka = AIOKafkaProducer(bootstrap_servers=space.settings.kafka.bootstrap)
    await kafka.start()
    try:
        for place, stored in product(intake, hostile):
            for partition in range(place.partitions):
                await hostile_batches.send(kafka, space.settings.kafka.topic_prefix + place.name, partition, stored)
        large = hostile_batches.bomb(MAX_MESSAGE_BYTES - 2**20)  # each one may be sent: 890 bytes, packed
        for n in range(LARGE):
            topic = f"{space.settings.kafka.topic_prefix}{DOCUMENTS_LIVE.name}"
            await hostile_batches.send(kafka, topic, n % DOCUMENTS_LIVE.partitions, large)
    finally:
        await kafka.stop()
    await publish(space, wiki, DOCUMENTS_LIVE, access("merger.md", ["nobody"]))
    await publish(space, wiki, IDENTITIES, identity("ann", []))
    await space.until("SELECT count(*) FROM access_sets WHERE acl_tags = '{wiki/nobody}'", 1)
    await space.until("SELECT count(*) FROM memberships WHERE groups = '{}'", 1)
    sent = len(hostile) * sum(topic.partitions for topic in intake) + LARGE
    await space.until("SELECT count(*) FROM dead_letters", sent)
    assert await codes(space) == {"unsigned": sent}
    status = Path(f"/proc/{space.processes['detect'].pid}/status").read_text()
    [peak] = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    assert peak * 1024 < MEMORY_BYTES
    assert space.stop("detect") == 0


@pytest.mark.slow
async def test_our_processes_sign_their_records_and_refuse_to_run_without_a_key(space: Space, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "dam.md").write_text("# Dam safety\n\nSeepage through the dam wall is measured daily.\n")
    declared = tmp_path / "connectors.toml"
    declared.write_text(f'[connector.notes]\nkind = "folder"\npaths = ["{folder}"]\nacl_tags = ["staff"]\n')
    space.environment |= {"PENSTOCK_PRODUCERS": "enforce", "PENSTOCK_CONNECTORS_FILE": str(declared)}
    for command in (("ingest", str(folder)), ("watch", str(folder)), ("worker", "canary"), ("worker", "connectors")):
        refused = run(space, *command)
        assert (refused.returncode, "PENSTOCK_KAFKA_SIGNING_KEY_FILE" in refused.stderr) == (1, True), refused.stderr
    key = await enrol(space, "ingest", "default/*")
    space.environment["PENSTOCK_KAFKA_SIGNING_KEY_FILE"] = str(key)
    space.start("detect", "vectors", "keywords")
    loaded = answer(space, "ingest", str(folder), "--wait")
    assert (loaded["indexed"], loaded["dead"]) == (1, 0)
    assert search_ids(space, "seepage") == ["dam.md"]
    foreign = run(space, "ingest", str(PROJECT / "LICENSE"), "--wait", "--tenant", "acme", "--json")
    assert (foreign.returncode, json.loads(foreign.stdout)["dead"]) == (1, 1)


@pytest.mark.slow
async def test_records_of_the_example_producer_are_accepted(space: Space) -> None:
    key = await enrol(space, "wiki", "acme/wiki")
    space.start("detect", env=ENFORCE)
    given = {
        "BOOTSTRAP": space.settings.kafka.bootstrap,
        "TOPIC_PREFIX": space.settings.kafka.topic_prefix,
        "KEY_FILE": str(key),
        "TENANT": "acme",
        "SOURCE": "wiki",
    }
    argv = [sys.executable, str(PROJECT / "examples" / "producer.py"), "leave policy.md", "Thirty days."]
    subprocess.run(argv, env={**os.environ, **given}, check=True, timeout=60)
    await space.until("SELECT count(*) FROM documents WHERE external_id = 'leave policy.md'", 1)
    assert await codes(space) == {}


def test_the_producer_commands_add_list_allow_rotate_and_remove_producers(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(space.home))

    def typed(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["producer", *arguments], catch_exceptions=False)

    def refused(*arguments: str) -> str:
        with pytest.raises(PenstockError) as error:  # main() makes it one line and the exit code 1
            typed(*arguments)
        return str(error.value)

    printed = typed("add", "wiki", "--allow", "acme/wiki", "--allow", "acme/shop-*")
    assert (printed.exit_code, printed.stdout[:28]) == (0, "-----BEGIN PRIVATE KEY-----\n")
    assert "PRIVATE" not in printed.stderr
    assert "rotate" in refused("add", "wiki", "--allow", "acme/wiki")
    file = space.home / "canary.pem"
    output = json.loads(typed("add", "canary", "--allow", "*/canary.*", "--key-file", str(file), "--json").stdout)
    assert (output["producer"], output["key_file"], output["private_key"]) == ("canary", str(file), None)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = ("add", "canary", "--allow", "*/canary.*", "--key-file", str(file), "--if-missing")
    assert typed(*again).exit_code == 0
    assert "is not overwritten" in refused("add", "shop", "--allow", "acme/shop", "--key-file", str(file))
    assert "was enrolled already" in refused("add", "shop", "--allow", "acme/shop", "--public-key", str(file))
    unused = space.home / "unused.pem"
    assert "no producer nobody" in refused("rotate", "nobody", "--key-file", str(unused))
    assert not unused.exists()
    assert "no producer nobody" in refused("remove", "nobody")
    assert "no producer nobody" in refused("allow", "nobody", "acme/*")
    assert typed("allow", "canary", "acme").exit_code == 2
    assert typed("allow", "canary", "acme/canary.*", "globex/canary.*").exit_code == 0
    for wrong in (["Wiki", "--allow", "a/b"], ["w", "--allow", "acme"], ["w", "--allow", "a/b/c"], ["w"]):
        assert typed("add", *wrong).exit_code == 2, wrong
    listed = json.loads(typed("list", "--json").stdout)
    assert [(entry["producer"], entry["allow"], len(entry["keys"])) for entry in listed] == [
        ("canary", ["acme/canary.*", "globex/canary.*"], 1),
        ("wiki", ["acme/wiki", "acme/shop-*"], 1),
    ]
    assert json.loads(typed("remove", "wiki", "--json").stdout) == {"producer": "wiki", "removed": True}
    shown = typed("list").stdout
    assert ("wiki" in shown, "canary  acme/canary.*, globex/canary.*" in shown) == (False, True)
    assert typed("add", "wiki", "--allow", "acme/wiki").exit_code == 0, "it may come back with another key"
    everything = {entry["producer"]: entry["keys"] for entry in json.loads(typed("list", "--all", "--json").stdout)}
    assert [key["in_force"] for key in everything["wiki"]] == [False, True]


@pytest.mark.slow
async def test_a_lapsed_producer_enrolled_again_does_not_regain_its_old_keys(space: Space) -> None:
    await enrol(space, "theirs", "acme/wiki", until=now() + timedelta(hours=1))
    await space.execute("UPDATE producers SET valid_until = now() WHERE name = 'theirs'")
    await enrol(space, "theirs", "acme/wiki")
    ended = "SELECT valid_until <= now() FROM producer_keys ORDER BY created_at"
    assert await space.query(ended) == [(True,), (None,)]
    await space.execute("UPDATE producers SET valid_until = now() WHERE name = 'theirs'")
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        await producers.remove(connection, "theirs")
        with pytest.raises(producers.Refused):
            await producers.remove(connection, "theirs")
    assert await space.query(ended) == [(True,), (True,)]

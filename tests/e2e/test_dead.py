"""Dead letters as an operator meets them: real workers, the real command."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from pipeline.kafka.client import deliver, producer
from tests.e2e.test_cli import answer, run
from tests.e2e.test_stream import document
from tests.support.space import Space, now
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, IDENTITIES, INDEX_LIVE, Topic

pytestmark = pytest.mark.stack

TYPE = [("ce_type", b"io.penstock.document.upserted.v1")]


async def publish_raw(space: Space, key: bytes, *values: bytes | None, topic: Topic = DOCUMENTS_LIVE) -> None:
    async with producer(space.settings.kafka) as kafka:
        await deliver(kafka.send_raw(topic, key, value, [*TYPE, ("mine", b"\xff")]) for value in values)


async def committed(space: Space, topic: Topic) -> int:
    """How many records detect's group has passed on a topic."""
    prefix = space.settings.kafka.topic_prefix
    admin = AIOKafkaAdminClient(bootstrap_servers=space.settings.kafka.bootstrap)
    await admin.start()
    try:
        offsets = await admin.list_consumer_group_offsets(f"{prefix}penstock-detect")
    finally:
        await admin.close()
    return sum(o.offset for at, o in offsets.items() if at.topic == f"{prefix}{topic.name}" and o.offset > 0)


def metric(space: Space, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{space.ports['detect']}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


LETTERS = "SELECT count(*) FROM dead_letters"
WAITING = "SELECT count(*) FROM dead_letters WHERE replayed_at IS NULL"


@pytest.mark.slow
async def test_a_flood_of_poison_pauses_intake_at_the_limit_of_dead_letters(space: Space) -> None:
    space.start("detect", env={"PENSTOCK_STREAM_DEAD_LETTERS_PER_MINUTE": "20"})
    good = document("flooded.md", "# Behind it\n\nThe valid one.")
    await publish_raw(space, good.key.encode(), *(b"{%d" % n for n in range(200)))
    await space.publish(good)
    await space.until(LETTERS, 20)
    await asyncio.sleep(4)  # more retries than a lane makes within a second
    assert await space.query(LETTERS) == [(20,)]
    await space.until("SELECT count(*) FROM documents", 1)  # what is valid never waits for the poison before it
    assert metric(space, "penstock_dead_letter_floods_total") == 1
    assert 0 < metric(space, "penstock_dead_letter_pause_seconds") <= 60
    floods = [line for line in space.log("detect").splitlines() if '"dead_letter_flood"' in line]
    assert [json.loads(line)["level"] for line in floods] == ["error"]
    assert space.stop("detect") == 0
    assert await committed(space, DOCUMENTS_LIVE) == 201
    assert await committed(space, DOCUMENTS_BACKFILL) == 0, "moved there, and kept there: nothing was passed over"

    space.start("detect", env={"PENSTOCK_STREAM_DEAD_LETTERS_PER_MINUTE": "1000"})
    await space.until(LETTERS, 200)
    await space.until("SELECT count(*) FROM documents WHERE version IS NOT NULL", 1)
    summary = run(space, "dead", "list", "--limit", "3").stdout.splitlines()
    assert len(summary) == 1 + 3 + 1
    assert "200 dead letters (invalid 200), 3 shown; next page: --after " in summary[-1]
    paged = run(space, "dead", "list", "--limit", "500", "--after", summary[-1].split()[-1]).stdout.splitlines()
    assert len(paged) == 1 + 197 + 1
    assert not {line.split()[0] for line in paged[1:-1]} & {line.split()[0] for line in summary[1:-1]}


@pytest.mark.slow
async def test_a_replay_never_overwrites_newer_versions_and_links_repeated_dead_letters(space: Space) -> None:
    """Version 1 comes from a clock that is ahead, and is refused; version 2 is fine; then version 1 is replayed."""
    space.start("detect", "vectors", "keywords")
    ahead = now() + timedelta(minutes=5, seconds=15)
    old = document("a.md", "# A\n\nThe old text.", version=1, observed_at=ahead)
    new = document("a.md", "# A\n\nThe new text.", version=2)
    await space.publish(old)
    await space.until(WAITING, 1)
    [letter] = answer(space, "dead", "list", "--code", "from_the_future")
    assert (letter["external_id"], letter["attempt"], letter["replayed_at"]) == ("a.md", 1, None)

    too_early = answer(space, "dead", "replay", letter["id"])
    assert [r["replayed"] for r in too_early] == [True]
    await space.until(LETTERS, 2)
    [again] = answer(space, "dead", "list")
    assert (again["attempt"], again["replay_of"]) == (2, letter["id"])
    assert again["first_failed_at"] == letter["first_failed_at"]
    assert answer(space, "dead", "show", letter["id"])["superseded_by"] == again["id"]

    await space.publish(new)
    await space.settled([new])
    why = answer(space, "why", "a.md", "--tenant", "acme")
    assert why["document"]["id"] == letter["document_id"]
    await asyncio.sleep(max(0.0, (ahead - timedelta(minutes=5) - now()).total_seconds() + 0.5))
    assert answer(space, "dead", "replay", "--all")[0]["replayed"]
    await space.until("SELECT count(*) FROM document_events WHERE outcome <> 'created'", 1)
    assert await space.query("SELECT version FROM documents") == [(2,)]
    assert answer(space, "dead", "list") == []
    assert len(answer(space, "dead", "list", "--all")) == 2
    await space.settled([new])
    why = answer(space, "why", "a.md", "--tenant", "acme")
    assert (why["searchable"], why["document"]["version"]) == (True, 2)
    assert "dead letter" not in why["reason"]
    assert [(d["attempt"], d["replayed_at"] is not None) for d in why["dead"]] == [(1, True), (2, True)]
    assert "replayed" in run(space, "why", "a.md", "--tenant", "acme").stdout
    results = answer(space, "search", "text", "--tenant", "acme", "--tag", "staff")["results"]
    assert ["new" in r["text"] for r in results] == [True]


async def test_the_dead_command_lists_shows_and_replays_dead_letters(space: Space) -> None:
    space.start("detect", "vectors", "keywords")
    key = "acme/wiki/caf\N{LATIN SMALL LETTER E WITH ACUTE}\x1b[31m.md".encode()
    await publish_raw(space, key, b'{"secret-canary', b"\xff\x00", None)
    await publish_raw(space, b"acme/wiki/ann", b"{", topic=IDENTITIES)
    await publish_raw(space, b"acme/wiki/x", b"no hint", topic=INDEX_LIVE)
    await space.until(LETTERS, 5)
    letters = answer(space, "dead", "list")
    ids = {(letter["external_id"], letter["value_bytes"]): letter["id"] for letter in letters}
    assert {letter["stage"] for letter in letters} - {"vectors", "keywords"} == {"detect", "identities"}
    times = [letter["at"] for letter in letters]
    assert times == sorted(times, reverse=True)
    assert len(answer(space, "dead", "list", "--stage", "identities")) == 1
    assert len(answer(space, "dead", "list", "--code", "no_value", "--since", "1h")) == 1
    assert answer(space, "dead", "list", "--tenant", "other") == []

    table = run(space, "dead", "list")
    assert table.returncode == 0, table.stderr
    assert "\x1b" not in table.stdout
    assert "secret-canary" not in table.stdout
    assert len(table.stdout.splitlines()) == 1 + 5 + 1

    name = key.decode().split("/")[-1]
    text, binary, none = (ids[name, n] for n in (15, 2, None))
    shown = run(space, "dead", "show", text)
    assert "15 bytes" in shown.stdout
    assert "mine: " in shown.stdout
    assert "secret-canary" not in shown.stdout
    assert "\x1b" not in shown.stdout
    whole = answer(space, "dead", "show", binary, "--value")
    assert (whole["value"], whole["key"]) == ({"base64": "/wA="}, {"text": key.decode()})
    assert whole["headers"] == [
        {"name": "ce_type", "text": TYPE[0][1].decode()},
        {"name": "mine", "base64": "/w=="},
    ]
    assert "value" not in answer(space, "dead", "show", text)
    assert run(space, "dead", "show", text, "--value").stdout == '{"secret-canary'
    assert answer(space, "dead", "show", none, "--value")["value"] is None

    replayed = run(space, "dead", "replay", text, "no:such:7", "--json")
    assert replayed.returncode == 1
    by_id: dict[str, Any] = {r["id"]: r for r in json.loads(replayed.stdout)}
    assert by_id[text]["replayed"]
    assert (by_id["no:such:7"]["replayed"], by_id["no:such:7"]["reason"]) == (False, "no dead letter has this id")
    await space.until(LETTERS, 6)  # it failed again
    people = run(space, "dead", "replay", "no:such:7", binary)
    assert people.returncode == 1
    assert people.stderr.splitlines() == ["error: no:such:7: no dead letter has this id"]
    assert people.stdout == "replayed 1 of 2 dead letters\n"


WRONG_ARGUMENTS: Sequence[tuple[list[str], int, str]] = (
    (["dead", "replay"], 2, "--all"),
    (["dead", "replay", "a:0:1", "--all"], 2, "--all"),
    (["dead", "replay", "a:0:1", "--code", "invalid"], 2, "need --all"),
    (["dead", "list", "--since", "yesterday"], 2, "not a time"),
    (["dead", "list", "--after", "a:0:1"], 1, "a:0:1"),
    (["dead", "show", "a:0:1"], 1, "a:0:1"),
    (["dead", "replay", "a:0:1"], 1, "a:0:1"),
)


async def test_the_dead_command_reports_wrong_arguments_and_that_there_are_no_dead_letters(space: Space) -> None:
    for arguments, code, says in WRONG_ARGUMENTS:
        process = run(space, *arguments)
        assert (arguments, process.returncode) == (arguments, code), process.stderr
        assert says in process.stderr
        assert "Traceback" not in process.stderr
    assert run(space, "dead", "list").stdout == "No dead letters.\n"
    assert answer(space, "dead", "list") == []
    assert answer(space, "dead", "replay", "--all") == []

"""Kafka is lost whole, with changes that it had acknowledged and nobody had read."""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from tests.support.processes import run_penstock
from tests.support.space import PROJECT, Space

pytestmark = [pytest.mark.stack, pytest.mark.slow]

WORKERS = ("detect", "vectors", "keywords")


def write(folder: Path, **notes: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in notes.items():
        (folder / f"{name}.md").write_text(f"# {name}\n\n{text}\n")


async def lose_kafka(space: Space) -> None:
    """The topics, and with them the offsets of those who read them; then new, empty ones."""
    prefix = space.settings.kafka.topic_prefix
    admin = AIOKafkaAdminClient(bootstrap_servers=space.settings.kafka.bootstrap)
    await admin.start()
    await admin.delete_topics([t for t in await admin.list_topics() if t.startswith(prefix)])
    while [t for t in await admin.list_topics() if t.startswith(prefix)]:
        await asyncio.sleep(0.2)
    await admin.close()
    done = await asyncio.to_thread(partial(run_penstock, "migrate", env=space.environment))
    assert done.returncode == 0, done.stderr


async def living_documents(space: Space) -> dict[str, tuple[str, tuple[str, ...]]]:
    """source/file → the text's last line, who may read it."""
    rows = await space.query(
        "SELECT d.source, d.external_id, b.text, a.acl_tags FROM documents d"
        " JOIN document_bodies b ON b.document_id = d.id JOIN access_sets a ON a.id = d.access_id"
        " WHERE d.deleted_at IS NULL"
    )
    return {
        f"{source}/{Path(name).stem}": (text.strip().splitlines()[-1], tuple(acl)) for source, name, text, acl in rows
    }


async def until_living_documents(space: Space, expected: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    deadline = time.monotonic() + 60
    while (documents := await living_documents(space)) != expected:
        assert time.monotonic() < deadline, documents
        await asyncio.sleep(0.2)


async def test_changes_lost_with_kafkas_topics_are_published_again_after_recover(space: Space, tmp_path: Path) -> None:
    typed, swept = tmp_path / "typed", tmp_path / "swept"
    declared = tmp_path / "connectors.toml"
    declared.write_text(f'[connector.swept]\nkind = "folder"\npaths = ["{swept}"]\nacl_tags = ["staff"]\n')
    connect = ("connector", "run", "swept", "--file", str(declared), "--json")
    for folder in (typed, swept):
        write(folder, kept="Stays.", edited="Before.", deleted="Goes.")
    await asyncio.to_thread(space.start, *WORKERS)
    assert (await space.penstock("ingest", str(typed), "--acl", "staff", "--wait", "--json"))[0] == 0
    assert (await space.penstock(*connect))[0] == 0
    (source,) = {name.partition("/")[0] for name in await living_documents(space)} - {"swept"}
    staff, board = (f"{source}/staff",), (f"{source}/board",)
    before = {
        f"{s}/{n}": (t, (f"{s}/staff",))
        for s in (source, "swept")
        for n, t in (("kept", "Stays."), ("edited", "Before."), ("deleted", "Goes."))
    }
    await until_living_documents(space, before)

    await asyncio.to_thread(space.stop, "detect")  # nobody reads from here on
    for folder in (typed, swept):
        write(folder, edited="After.", new="Comes.")
        (folder / "deleted.md").unlink()
    (typed / ".penstock.toml").write_text('acl = ["board"]\n')
    assert (await space.penstock("ingest", str(typed), "--acl", "staff", "--json"))[0] == 0
    assert (await space.penstock(*connect))[0] == 0
    assert await living_documents(space) == before
    for name in ("vectors", "keywords"):
        await asyncio.to_thread(space.stop, name)
    await lose_kafka(space)

    await asyncio.to_thread(space.start, *WORKERS)
    code, again = await space.penstock("recover", "--topics-lost", "--json")
    assert code == 0
    assert again["documents"] == 5, "edited and new twice; typed/kept, whose readers changed"
    assert again["deletions"] >= 2
    assert (await space.penstock("ingest", str(typed), "--acl", "staff", "--wait", "--json"))[0] == 0
    assert (await space.penstock(*connect))[0] == 0
    texts = {"kept": "Stays.", "edited": "After.", "new": "Comes."}
    expected = {f"{source}/{name}": (text, board) for name, text in texts.items()}
    expected |= {f"swept/{name}": (text, ("swept/staff",)) for name, text in texts.items()}
    await until_living_documents(space, expected)
    assert staff not in {acl for _, acl in (await living_documents(space)).values()}

    code, nothing = await space.penstock("recover", "--topics-lost", "--json")
    assert (code, nothing["documents"], nothing["deletions"]) == (0, 0, 0)
    code, report = await space.penstock("audit", "--repair", "--json")
    assert (code, report["clean"]) == (0, True), report


async def test_recover_requires_one_option_that_names_the_loss(space: Space) -> None:
    for arguments in ((), ("--since", "1h", "--topics-lost")):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cli.main",
            "recover",
            *arguments,
            env=space.environment,
            cwd=PROJECT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        assert process.returncode == 2
        assert "give one of" in errors.decode()

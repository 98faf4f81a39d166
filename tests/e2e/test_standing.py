"""Standing questions of the whole of Penstock: a change of a document reaches the receiver of its asker's events by the
real workers, and no text reaches an asker who may no longer read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.webhooks import FakeWebhook
from tests.support.space import Space
from tests.support.waiting import until

pytestmark = [pytest.mark.stack, pytest.mark.slow]

QUESTION = "how many turbines does the reservoir of the dam feed"
DAM = "The reservoir of the dam feeds four turbines in the hall."


async def test_an_asker_hears_of_every_change_and_sees_nothing_after_a_revocation(space: Space, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    dam, readers = folder / "dam.md", folder / ".penstock.toml"
    space.environment["PENSTOCK_WEBHOOKS_KEY"] = "a key of thirty-two characters and more"

    async def answer(*arguments: str) -> Any:
        code, body = await space.penstock(*arguments, "--json")
        assert code == 0, body
        return body

    async def publish(*, text: str | None = None, reader: str | None = None) -> None:
        if text is not None:
            dam.write_text(f"# Dam\n\n{text}\n")
        if reader is not None:
            readers.write_text(f"acl = [{json.dumps(f'user:{reader}')}]\n")
        await answer("ingest", str(folder), "--wait")

    async with FakeWebhook() as receiver:

        def changes() -> list[str]:
            return [event["change"] for event in receiver.events() if event.get("question_id") == id_]

        added = await answer(
            "webhook", "add", "desk", receiver.url, "--tenant", "default", "--allow-private", "--answers"
        )
        receiver.secrets.append(added["secret"])
        space.start("detect", "vectors", "keywords", "connectors", "analysis")
        await publish(text=DAM, reader="ann")
        id_ = (await answer("ask", QUESTION, "--as", "ann", "--keep"))["standing_id"]

        await publish(text=DAM.replace("four", "five"))
        await until(lambda: "changed" in changes())
        [listed] = (await answer("standing", "list", "--as", "ann"))["standing"]
        assert (listed["id"], listed["state"]) == (id_, "invalidated")
        again = await answer("standing", "ask", id_, "--as", "ann")
        lines = [(line["change"], line["text"]) for line in again["difference"]]
        assert any(change == "removed" and "four turbines" in text for change, text in lines), lines
        assert any(change == "added" and "five turbines" in text for change, text in lines), lines

        (folder / "hall.md").write_text("# Hall\n\nThe reservoir of the dam feeds two more turbines since spring.\n")
        await publish()
        await until(lambda: changes().count("new") == 2)  # the edit's own passage was new for the first answer

        await publish(reader="bob")
        await until(lambda: "unreadable" in changes())
        shown = await answer("standing", "show", id_, "--as", "ann")
        assert {sentence["text"] for sentence in shown["sentences"]} == {None}
        assert shown["new_documents"] == []
        last = await answer("standing", "ask", id_, "--as", "ann")
        assert {line["change"] for line in last["difference"]} == {"withheld", "added"}
        assert not {"five", "hall.md"} & set(json.dumps(last).replace('"', " ").split())
        assert "turbines" not in str(receiver.received)

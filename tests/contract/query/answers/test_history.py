"""Earlier answers are shown to the model, and so to whoever asks, only while all they were made from may be read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
import pytest_asyncio

from pipeline.conversations.embed import ConversationVectors
from pipeline.conversations.record import Conversations
from pipeline.embedding.port import OneModel
from pipeline.embedding.tokens import byte_pairs
from pipeline.runtime.settings import ConversationSettings
from pipeline.stages.stage import Incoming
from query.modes import history
from query.modes.history import WITHHELD
from query.settings import ChatSettings
from tests.fakes.chat import FakeChat
from tests.support.query.http_kit import as_, service_over
from tests.support.query.library import Library, access, deletion, document
from topics.codec import encode
from topics.messages import ConversationForgotten, ConversationRecorded, DocumentUpserted, Pair

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

SECRET = "canary4711"
START = datetime.now(UTC) - timedelta(hours=1)


@dataclass
class Assistant:
    """Asks for one member over HTTP, and records what was said: as an assistant does, with the real stage."""

    library: Library
    client: httpx.AsyncClient
    chat: FakeChat
    tenant: str
    gate: int = 100_000
    said: list[Pair] = field(default_factory=list)
    documents: dict[str, DocumentUpserted] = field(default_factory=dict)

    async def publish(self, name: str, content: str, *groups: str) -> None:
        self.documents[name] = document(name, content, tenant=self.tenant, acl_tags=list(groups))
        await self.library.put(self.documents[name])

    async def share(self, name: str, *groups: str) -> None:
        """With these groups alone: accepted, and neither store knows it yet."""
        await self.library.accept(access(self.documents[name], groups))

    async def remove(self, name: str) -> None:
        await self.library.accept(deletion(self.documents[name]))

    async def ask(self, question: str, **fields: Any) -> dict[str, Any]:
        """From the documents that keywords find, with the member's history."""
        answer = await self.client.post(
            "/v1/answers",
            headers=as_("ann", self.tenant),
            json={"question": question, "mode": "keyword", "history": True, **fields},
        )
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    async def converse(self, question: str, **fields: Any) -> str:
        """Returns the answer, which is recorded."""
        response = await self.ask(question, **fields)
        await self.record(question, response["answer"], UUID(response["answer_id"]))
        return str(response["answer"])

    async def record(self, question: str, answer: str, answer_id: UUID | None) -> None:
        pair = Pair(
            question=question,
            answer=answer,
            answer_id=answer_id,
            asked_at=START + timedelta(seconds=len(self.said)),
        )
        self.said.append(pair)
        await self.send([pair])

    async def send(self, pairs: Sequence[Pair], *, member: str = "ann") -> None:
        await self._take(
            ConversationRecorded(
                tenant=self.tenant,
                source="chat",
                observed_at=START,
                member=member,
                conversation="c",
                pairs=list(pairs),
            )
        )

    async def forget(self) -> None:
        await self._take(
            ConversationForgotten(tenant=self.tenant, source="chat", observed_at=START, member="ann", conversation="c")
        )

    async def _take(self, message: ConversationRecorded | ConversationForgotten) -> None:
        settings = ConversationSettings(gate_tokens=self.gate, embeddings_per_second=10_000)
        library = self.library
        stage = Conversations(library.pool, library.detect._dead, byte_pairs().count, library.metrics, settings)
        record = encode(message)
        await stage.handle([Incoming("conversations", 0, 1, record.key, record.value, record.headers, "live")])
        vectors = ConversationVectors(library.pool, OneModel(library.embedder), library.metrics, settings)
        while await vectors.turn():
            pass

    async def prompt(self, question: str) -> str:
        """Ask, and return the whole prompt except the rules."""
        before = len(self.chat.requests)
        await self.ask(question)
        assert len(self.chat.requests) == before + 1, "the model was not asked"
        return str(self.chat.requests[-1]["messages"][1]["content"])


@asynccontextmanager
async def assistant_over(library: Library, tenant: str, **fields: Any) -> AsyncIterator[Assistant]:
    async with FakeChat() as chat:
        settings = ChatSettings(base_url=chat.url, model=chat.model, timeout_seconds=30)
        async with service_over(library, chat=settings) as (client, _):
            yield Assistant(library, client, chat, tenant, **fields)


@pytest_asyncio.fixture(loop_scope="module")
async def assistant(library: Library, tenant: str) -> AsyncIterator[Assistant]:
    """Ann is of the board, and has asked about its budget and about the canteen; the canteen is everybody's."""
    async with assistant_over(library, tenant) as assistant:
        await begin(assistant)
        yield assistant


async def begin(assistant: Assistant) -> None:
    await member_of(assistant.library, assistant.tenant, "board", "staff")
    await assistant.publish("budget.md", f"The reactor budget is {SECRET} million.", "board")
    await assistant.publish("canteen.md", "The canteen serves lentil soup on Mondays.", "staff")
    await assistant.publish("parking.md", "Parking is free behind the harbour gate.", "staff")
    assert SECRET in await assistant.converse("What is the reactor budget?")
    assert "lentil" in await assistant.converse("What does the canteen serve?", history=False)


async def member_of(library: Library, tenant: str, *groups: str) -> None:
    await library.execute(
        "INSERT INTO memberships (tenant, source, principal, groups, observed_at) VALUES (%s, 'wiki', 'ann', %s, now())"
        " ON CONFLICT (tenant, source, principal) DO UPDATE SET groups = excluded.groups",
        tenant,
        list(groups),
    )


QUESTION = "Where is the parking, free behind which gate?"


async def test_earlier_answers_are_shown_to_the_model_while_their_documents_are_readable(assistant: Assistant) -> None:
    response = await assistant.ask(QUESTION)
    assert response["notes"] == []
    prompt = await assistant.prompt(QUESTION)
    assert SECRET in prompt
    assert "lentil" in prompt
    assert WITHHELD not in prompt


async def withheld(assistant: Assistant) -> None:
    prompt = await assistant.prompt(QUESTION)
    assert SECRET not in prompt
    assert "What is the reactor budget?" in prompt, "the member's own question stays"
    assert f"What is the reactor budget?\nAnswer: {WITHHELD}" in prompt
    assert "lentil" in prompt, "what was made from other documents stays"
    response = await assistant.ask(QUESTION)
    assert [note for note in response["notes"] if "withheld" in note] == [
        "1 answer of the history was withheld: not all of their sources can be read now, or they are too many"
    ]
    assert SECRET not in json.dumps(response)


async def test_of_earlier_answers_from_too_many_documents_together_the_newest_are_shown(
    assistant: Assistant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these documents is recorded in the audit trail with each answer."""
    monkeypatch.setattr(history, "MAX_PROVENANCE_DOCUMENTS", 1)
    await withheld(assistant)


async def test_an_earlier_answer_from_a_revoked_document_is_withheld(assistant: Assistant) -> None:
    await assistant.share("budget.md", "auditors")
    await withheld(assistant)
    await assistant.share("budget.md", "staff")
    assert SECRET in await assistant.prompt(QUESTION)


async def test_an_earlier_answer_from_a_deleted_document_is_withheld(assistant: Assistant) -> None:
    await assistant.remove("budget.md")
    await withheld(assistant)


async def test_an_earlier_answer_is_withheld_from_a_member_who_left_the_group(assistant: Assistant) -> None:
    await member_of(assistant.library, assistant.tenant, "staff")
    await withheld(assistant)


async def test_revoking_an_unrelated_document_withholds_no_earlier_answer(assistant: Assistant) -> None:
    await assistant.share("parking.md", "auditors")
    await assistant.publish("gate.md", "The harbour gate is behind the parking.", "staff")
    prompt = await assistant.prompt("Where is the harbour gate?")
    assert SECRET in prompt
    assert "lentil" in prompt
    assert "Parking is free" not in prompt


async def test_an_answer_that_used_an_earlier_answer_is_withheld_with_it(assistant: Assistant) -> None:
    """A model may repeat in an answer about parking what it read of the budget in an earlier answer."""
    assistant.chat.faults.say = f"Parking is free, and the budget was {SECRET} million [1]."
    assert SECRET in await assistant.converse("And is the parking free behind the gate?")
    assistant.chat.faults.say = None
    await assistant.share("budget.md", "auditors")
    prompt = await assistant.prompt(QUESTION)
    assert SECRET not in prompt
    assert prompt.count(WITHHELD) == 2
    assert "lentil" in prompt


async def test_an_earlier_answer_of_unknown_provenance_is_withheld(assistant: Assistant) -> None:
    for answer_id in (None, uuid4()):  # as before answers were named; a name that no answer of this tenant has
        await assistant.record(f"Which word is it, {answer_id}?", "The word is xyzzy.", answer_id)
    prompt = await assistant.prompt(QUESTION)
    assert "xyzzy" not in prompt
    assert prompt.count("Which word is it") == 2
    assert SECRET in prompt


async def test_provenance_recorded_for_another_tenant_is_ignored(assistant: Assistant) -> None:
    other = "no" + assistant.tenant
    await assistant.library.execute(
        "INSERT INTO conversation_provenance SELECT %s, answer_id, '{}' FROM conversation_provenance WHERE tenant = %s",
        other,
        assistant.tenant,
    )
    await assistant.library.execute("DELETE FROM conversation_provenance WHERE tenant = %s", assistant.tenant)
    prompt = await assistant.prompt(QUESTION)
    assert SECRET not in prompt
    assert prompt.count(WITHHELD) == 2


async def test_a_resent_conversation_keeps_its_provenance_and_forgetting_it_removes_all(
    assistant: Assistant,
) -> None:
    library, tenant = assistant.library, assistant.tenant
    await library.execute("DELETE FROM answer_provenance WHERE tenant = %s", tenant)  # as after PROVENANCE_DAYS
    await assistant.send(assistant.said)
    assert SECRET in await assistant.prompt(QUESTION)
    assert len(await library.execute("SELECT answer_id FROM conversation_provenance WHERE tenant = %s", tenant)) == 2
    await assistant.forget()
    assert await library.execute("SELECT answer_id FROM conversation_provenance WHERE tenant = %s", tenant) == []
    assert "What is the reactor budget?" not in await assistant.prompt(QUESTION)


@pytest.mark.parametrize("first_is_newer", [True, False])
async def test_provenance_of_an_answer_replaced_in_the_conversation_is_removed(
    assistant: Assistant, first_is_newer: bool
) -> None:
    """The same pair is said twice, as two answers: the second message corrects the first, or comes too late."""
    ids = sorted((uuid4(), uuid4()), key=str, reverse=first_is_newer)  # at the same moment the greater one counts
    for answer_id in ids:
        await assistant.library.execute(
            "INSERT INTO answer_provenance VALUES (%s, %s, %s)", assistant.tenant, answer_id, [uuid4()]
        )
        pair = Pair(question="Which gate?", answer="The northern one.", answer_id=answer_id, asked_at=START)
        await assistant.send([pair])
    kept = await assistant.library.execute(
        "SELECT answer_id FROM conversation_provenance WHERE tenant = %s AND answer_id = ANY(%s)", assistant.tenant, ids
    )
    assert kept == [(max(ids, key=str),)]


@pytest.mark.parametrize("served", ["nearest", "newest"])
async def test_a_chunked_history_withholds_answers_like_a_whole_one(library: Library, tenant: str, served: str) -> None:
    """Chunks hold ten pairs each, answers included: what is shown of one is made anew."""
    async with assistant_over(library, tenant, gate=1) as assistant:
        await begin(assistant)
        for n in range(20):
            await assistant.record(f"Is rule {n} in force?", f"Rule {n} is in force.", None)
        if served == "newest":
            await library.execute("UPDATE conversation_chunks SET embedding = NULL WHERE tenant = %s", tenant)
        response = await assistant.ask(QUESTION)
        [step] = [step for step in response["steps"] if step["step"] == "history"]
        assert (step["served"], step["pieces"], step["withheld"]) == (served, 3, 20)
        prompt = await assistant.prompt(QUESTION)
        assert SECRET in prompt
        assert "Is rule 19 in force?" in prompt
        assert "Rule 19 is in force." not in prompt
        await assistant.share("budget.md", "auditors")
        prompt = await assistant.prompt(QUESTION)
        assert SECRET not in prompt
        assert "lentil" in prompt

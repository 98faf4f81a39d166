"""The laws of connectors, also during failures: lost events, expired cursors, rate limits, crashes and truncated
listings."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime

from connectors.conform.trial import Broken, Trial
from connectors.source import Document, Gone, Listed, Playground, Refused, Request, Unreadable
from pipeline.core.metadata_keys import terms
from topics.messages import AnyMessage, DocumentDeleted, DocumentMessage, DocumentUpserted

Law = Callable[[Trial], Awaitable[str]]
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")


def text(name: str, more: str = "") -> str:
    """Return a text of a few paragraphs."""
    return "\n\n".join(
        [f"This is what {name} is about: the {name} of the company, and how to work with it."]
        + [f"Section {n} of {name} tells about part {n} of it, in a sentence or two that say enough." for n in (1, 2)]
        + ([more] if more else [])
    )


async def write_documents(t: Trial, names: Sequence[str] = NAMES) -> dict[str, str]:
    """Write a document for each name; returns their external ids by name."""
    return {name: await t.play.write(name, text(name)) for name in names}


def summary(messages: Sequence[AnyMessage]) -> str:
    """Return how many messages there are of each kind, for people."""
    kinds = [message.kind.split(".")[1] for message in messages]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "nothing"


def documents_of(messages: Sequence[AnyMessage]) -> set[str]:
    return {message.external_id for message in messages if isinstance(message, DocumentMessage)}


def require(holds: bool, why: str) -> None:
    if not holds:
        raise Broken(why)


async def first_crawl(t: Trial) -> str:
    """A first crawl publishes every document, readable for principals with access and for nobody else."""
    ids = set((await write_documents(t)).values())
    await t.load()
    alive, inside, outside = await t.alive(), await t.readable(t.play.inside), await t.readable(t.play.outside)
    require(ids <= alive, f"{len(ids - alive)} of {len(ids)} documents did not arrive")
    require(ids <= inside, f"{len(ids - inside)} of {len(ids)} documents cannot be read by a principal who has access")
    require(not outside, f"{len(outside)} documents can be read by a principal who has no access")
    return f"{len(alive)} documents: all of them readable with access, none without"


async def no_change(t: Trial) -> str:
    """When nothing has changed, polling, sweeping, listing groups and reading everything again publish nothing."""
    await write_documents(t)
    await t.load()
    t.take()
    await t.run("changes", "sweep", "groups", "full")
    messages = t.take()
    require(not messages, f"published {summary(messages)} although nothing had changed")
    return "0 published by changes, sweep, groups and full"


async def edit(t: Trial) -> str:
    """An edit is published once, with its new text, by the next poll."""
    ids = await write_documents(t)
    await t.load()
    t.take()
    await t.play.write("beta", text("beta", "A quokka was added here."))
    await t.run("changes")
    messages = t.take()
    upserts = [m for m in messages if isinstance(m, DocumentUpserted)]
    require(documents_of(messages) == {ids["beta"]}, f"of one edit the poll published {summary(messages)}")
    require(len(upserts) == 1, f"of one edit the poll published {summary(messages)}")
    require("quokka" in upserts[0].content, "the published revision lacks the new text of the edit")
    await t.run("changes", "sweep")
    require(not (later := t.take()), f"after the edit, more was published: {summary(later)}")
    return "1 upsert, once"


async def move(t: Trial) -> str:
    """A document that is renamed or moved keeps its external id, its text and its access."""
    ids = await write_documents(t)
    await t.load()
    before = await t.alive()
    t.take()
    await t.play.move("gamma")
    await t.run("changes", "sweep")
    messages = t.take()
    require(not [m for m in messages if isinstance(m, DocumentDeleted)], "a move was published as a delete")
    gained = await t.alive() - before
    require(ids["gamma"] in await t.alive(), "a moved document is gone")
    require(ids["gamma"] not in gained, "a moved document has become another one")
    require(ids["gamma"] in await t.readable(t.play.inside), "a moved document cannot be read any more")
    return f"the same id; {summary(messages)}"


async def relabel(t: Trial) -> str:
    """A change of nothing but metadata, such as a label, is published once, with the same text, and nothing is embedded
    again. Metadata have the types that the kind declares."""
    ids = await write_documents(t)
    await t.load()
    published = {m.external_id: m for m in t.take() if isinstance(m, DocumentUpserted)}
    keys = getattr(t.kind, "metadata_keys", {})
    for name, value in ((name, value) for m in published.values() for name, value in m.metadata.items()):
        is_empty = value is None or value in ("", [])
        typed = name not in keys or is_empty or terms({name: value}, {name: keys[name]})
        require(bool(typed), f"the metadata {name} are no {keys.get(name)}")
    change = getattr(t.play, "relabel", None)
    if change is None:
        return f"{len(published)} documents; the playground changes no metadata alone (relabel)"
    before, chunks = published[ids["gamma"]], await t.chunks(ids["gamma"])
    await change("gamma")
    await t.run("changes", "sweep")
    messages = t.take()
    upserts = [m for m in messages if isinstance(m, DocumentUpserted)]
    require(
        len(upserts) == 1 and documents_of(messages) == {ids["gamma"]},
        f"of one change of metadata {summary(messages)} was published",
    )
    [after] = upserts
    require(after.metadata != before.metadata, "the published metadata are those from before the change")
    require((after.title, after.content) == (before.title, before.content), "the text changed with the metadata")
    require(await t.chunks(ids["gamma"]) == chunks, "a change of metadata cut the text anew, so that it is embedded")
    await t.run("changes", "sweep")
    require(not (later := t.take()), f"after the change, more was published: {summary(later)}")
    changed = sorted(
        name for name in {*before.metadata, *after.metadata} if before.metadata.get(name) != after.metadata.get(name)
    )
    return f"{', '.join(changed)}: 1 upsert, once, with the same chunks"


async def delete(t: Trial) -> str:
    """A removed document is deleted, and no other document is."""
    ids = await write_documents(t)
    await t.load()
    before = await t.alive()
    t.take()
    await t.play.remove("delta")
    await t.run("changes", "sweep")
    messages = t.take()
    alive = await t.alive()
    require(ids["delta"] not in alive, "a removed document is still there")
    lost = before - alive - {ids["delta"]}
    require(not lost, f"with one removed document, {len(lost)} others were deleted")
    await t.run("changes", "sweep")
    require(not (later := t.take()), f"after the delete, more was published: {summary(later)}")
    return summary(messages)


async def restore(t: Trial) -> str:
    """A removed document that is restored unchanged is readable again, although its version may be older than the
    delete's."""
    ids = await write_documents(t)
    await t.load()
    await t.play.remove("delta")
    await t.run("changes", "sweep")
    require(ids["delta"] not in await t.alive(), "a removed document is still there")
    t.take()
    await t.play.restore("delta")
    await t.run("changes", "sweep")
    require(ids["delta"] in await t.readable(t.play.inside), "a restored document cannot be read again")
    return summary(t.take())


async def restricted(t: Trial) -> str:
    """A document whose access is withdrawn (at a parent, where access is inherited) is hidden from everybody who lost
    it; polling and sweeping alone find that out."""
    ids = await write_documents(t)
    await t.load()
    require(
        ids["zeta"] in await t.readable(t.play.inside), "the document could not be read before its access was withdrawn"
    )
    t.take()
    await t.play.restrict("zeta")
    await t.run("changes", "groups", "sweep")
    require(
        ids["zeta"] not in await t.readable(t.play.inside),
        "a withdrawn document can still be read: does the source report required_tags?",
    )
    require(not await t.readable(t.play.outside), "a principal who has no access can read documents")
    messages = t.take()
    require(bool(messages), "the withdrawal was not published")
    return summary(messages)


async def member_removed(t: Trial) -> str:
    """A principal who loses a membership can no longer read its documents, and no document is published for that."""
    ids = set((await write_documents(t)).values())
    await t.load()
    require(ids <= await t.readable(t.play.inside), "the documents could not be read before the membership was removed")
    t.take()
    await t.play.leave()
    await t.run("groups")
    messages = t.take()
    left = ids & await t.readable(t.play.inside)
    require(not left, f"{len(left)} documents can still be read by the removed member")
    upserts = [m for m in messages if isinstance(m, DocumentUpserted)]
    require(not upserts, f"{len(upserts)} documents were published again for a change of membership")
    return summary(messages)


async def slim_is_full(t: Trial) -> str:
    """A sweep lists exactly the documents that a full read returns, with the same access and revisions."""
    await write_documents(t)
    await t.play.restrict("zeta")
    await t.load()  # the runner does nothing by itself after that
    assert t.instance is not None
    source = t.instance.source
    assert source is not None
    read: dict[str, Document | Unreadable] = {}
    async for page in source.full(None):
        read |= {entry.external_id: entry for entry in page.entries if not isinstance(entry, Gone)}
    listed: dict[str, Listed] = {}
    async for entries in source.slim():
        listed |= {entry.external_id: entry for entry in entries if isinstance(entry, Listed)}
    require(bool(read), "nothing was read")
    only = f"{len(read.keys() - listed.keys())} documents are only read, {len(listed.keys() - read.keys())} only listed"
    require(read.keys() == listed.keys(), only)
    for id_, entry in read.items():
        same = (set(entry.acl_tags), set(entry.required_tags)) == (
            set(listed[id_].acl_tags),
            set(listed[id_].required_tags),
        )
        require(same, "a document is read with another access than it is listed with")
        require(
            entry.revision == listed[id_].revision, "a document is read with another revision than it is listed with"
        )
    return f"{len(read)} documents, read and listed alike"


LAWS: dict[str, Law] = {
    "first-crawl": first_crawl,
    "no-change": no_change,
    "edit": edit,
    "move": move,
    "relabel": relabel,
    "delete": delete,
    "restore": restore,
    "restricted": restricted,
    "member-removed": member_removed,
    "slim-is-full": slim_is_full,
}


EVENT_SECONDS = 5.0
"""How long a source may take to open its channels and send its events."""
TRUNCATED_SECONDS = 20.0
"""How long to wait for a sweep, which may rightly refuse a listing that was cut short."""
MASS_DELETE_DOCUMENTS = 30
"""More documents, and a larger share, than the guard against mass deletion permits."""


async def webhook_lost(t: Trial) -> str:
    """When every event is lost, the sweep and the next poll find the changes."""
    ids = await write_documents(t)
    await t.load()
    t.take()
    await t.play.write("alpha", text("alpha", "A wombat was added here."))
    await t.play.remove("beta")
    new = await t.play.write("theta", text("theta"))
    t.play.sent()
    await t.run("sweep")
    alive = await t.alive()
    require(ids["beta"] not in alive, "the sweep did not find what was removed")
    require(new in alive, "the sweep did not find what is new")
    messages = t.take()
    by = "sweep"
    if ids["alpha"] not in documents_of(messages):
        await t.run("changes")
        messages, by = [*messages, *t.take()], "sweep and poll"
    edits = [m for m in messages if isinstance(m, DocumentUpserted) and m.external_id == ids["alpha"]]
    require(any("wombat" in m.content for m in edits), "neither sweep nor poll found the edit")
    return f"{summary(messages)} by {by}"


async def webhook_doubled(t: Trial) -> str:
    """Events that arrive twice and in reverse order do no harm, and events without a valid signature are refused."""
    ids = await write_documents(t)
    await t.load()
    instance = t.instance
    assert instance is not None
    t.take()
    t.play.sent()
    await t.play.write("alpha", text("alpha", "First a numbat."))
    await t.play.write("alpha", text("alpha", "Then a bilby."))
    await t.play.write("beta", text("beta", "And a potoroo."))
    requests = await _events(t)
    for request in [*reversed(requests), *requests]:
        await instance.on_event(request)
    await t.wait_until(
        lambda: all(
            instance.activities[name].status.state == "idle" for name in ("events", "changes", "sweep", "tags")
        ),
        "the reactions to the events",
    )
    await t.run("changes", "sweep")
    messages = t.take()
    upserts = [m for m in messages if isinstance(m, DocumentUpserted)]
    per_document = Counter(m.external_id for m in upserts)
    require(
        set(per_document) == {ids["alpha"], ids["beta"]}, f"of two edited documents {summary(messages)} was published"
    )
    newest = [m for m in upserts if m.external_id == ids["alpha"]][-1]
    require("bilby" in newest.content and "numbat" not in newest.content, "an older text replaced a newer one")
    require(
        per_document[ids["alpha"]] <= 2 and per_document[ids["beta"]] == 1, "an unchanged document was published again"
    )
    if not requests:
        return "the source sends no events; polling found the edits"
    try:
        await instance.on_event(_forged(t.play, requests[0]))
    except Refused:
        return f"{len(requests)} events, twice and in reverse order: {summary(messages)}; a forged one was refused"
    raise Broken("an event without its signature was accepted")


def _forged(play: Playground, request: Request) -> Request:
    """Return the request without its signature, which most sources have in a header."""
    forge: Callable[[Request], Request] | None = getattr(play, "forged", None)
    return forge(request) if forge else Request({}, {}, request.body)


async def _events(t: Trial) -> Sequence[Request]:
    deadline = time.monotonic() + EVENT_SECONDS
    requests = list(t.play.sent())
    while not requests and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
        requests += t.play.sent()
    return requests


async def cursor_expired(t: Trial) -> str:
    """When the source expires a cursor during the crawl, and another one between polls, nothing is lost."""
    ids = await write_documents(t)
    expired: list[int] = []

    async def before(method: str, number: int) -> None:
        if method == "full" and number == 1 and not expired:
            expired.append(number)
            await t.play.trouble(expired=True)

    t.record.before = before
    await t.load()
    t.record.before = None
    messages = t.take()
    require(set(ids.values()) <= await t.alive(), "documents are missing after an expired cursor")
    again = [
        id_ for id_, n in Counter(m.external_id for m in messages if isinstance(m, DocumentUpserted)).items() if n > 1
    ]
    require(not again, f"{len(again)} documents were published twice although they had not changed")
    await t.play.write("alpha", text("alpha", "A dunnart was added here."))
    await t.play.trouble(expired=True)
    await t.run("changes")
    await t.run("sweep", "changes")
    upserts = [m for m in t.take() if isinstance(m, DocumentUpserted)]
    require(
        any("dunnart" in m.content for m in upserts if m.external_id == ids["alpha"]),
        "an edit before an expired cursor of changes was lost",
    )
    return "everything was published once, and the edit before the expiry was found"


async def throttled(t: Trial) -> str:
    """When the source responds repeatedly with 429, then with 500, the runner waits, and nothing is lost."""
    ids = set((await write_documents(t)).values())
    await t.play.trouble(throttled=12)
    await t.load()
    await t.play.trouble(failing=4)
    await t.play.write("alpha", text("alpha", "A quoll was added here."))
    await t.run("changes", "sweep", "groups")
    require(ids <= await t.alive(), "documents are missing after repeated responses 429")
    upserts = [m for m in t.take() if isinstance(m, DocumentUpserted)]
    edits = [m for m in upserts if "quoll" in m.content]
    require(len(edits) == 1, f"an edit during repeated responses 500 was published {len(edits)} times")
    return "12 responses 429, 4 responses 500: everything was published"


async def crash(t: Trial) -> str:
    """The runner is killed during the crawl, when Kafka has a page that the runner has not recorded: it resumes, and
    publishes at most that page again. Changes that the source reverts while no runner runs are reverted in the ledger:
    an added document, an edit and a removal."""
    names = await write_documents(t, [f"page-{n:02}" for n in range(10)])
    ids = set(names.values())
    t.witness.silent_after = heard = 4  # of upserts: how many messages go before them (groups) is a matter of luck
    t.start()

    def unrecorded() -> list[str]:
        """Documents whose publication the runner has not recorded."""
        upserts = [m.external_id for m in t.witness.messages if isinstance(m, DocumentUpserted)]
        return [name for name, id_ in names.items() if id_ in upserts[heard:]]

    await t.wait_until(lambda: bool(unrecorded()), "the crawl to get under way")
    await t.stop()
    t.witness.silent_after = None
    largest = max(len(call.ids) for call in t.record.pages("full"))
    removed = unrecorded()[0]
    await t.play.remove(removed)
    await t.load()
    await t.run("changes", "sweep")
    upserts = Counter(m.external_id for m in t.take() if isinstance(m, DocumentUpserted))
    removed_id = names.pop(removed)
    ids.remove(removed_id)
    alive = await t.alive()
    require(ids <= upserts.keys() and ids <= alive, "documents are missing after a crash")
    require(
        removed_id not in alive,
        "a document that was published, and removed before the runner started again, is still there",
    )
    again = [id_ for id_, n in upserts.items() if n > 1]
    require(len(again) <= largest, f"{len(again)} documents were published again; a page has {largest}")
    await _revert_changes(t, names)
    return f"{len(again)} of {len(ids)} documents again; a page has {largest}; changes reverted meanwhile are reverted"


async def _revert_changes(t: Trial, names: Mapping[str, str]) -> None:
    edited, removed = sorted(names)[:2]
    await t.play.write(edited, text(edited, "A wombat was added here."))
    await t.kill_after(lambda message: "wombat" in getattr(message, "content", ""))
    await t.play.write(edited, text(edited))
    t.start()
    await t.run("changes", "sweep")
    await t.play.remove(removed)
    await t.kill_after(lambda m: isinstance(m, DocumentDeleted) and m.external_id == names[removed])
    await t.play.restore(removed)
    t.start()
    await t.run("changes", "sweep")
    upserts = [m for m in t.take() if isinstance(m, DocumentUpserted) and m.external_id == names[edited]]
    newest = max(upserts, key=lambda message: (message.version, message.observed_at))
    require(
        "wombat" not in newest.content, "an edit that was reverted before the runner started again is still published"
    )
    require(
        names[removed] in await t.alive(),
        "a document that was removed and restored before the runner started again is missing",
    )


async def truncated(t: Trial) -> str:
    """A listing that ends early deletes nothing, even if an operator allows a mass deletion."""
    ids = set((await write_documents(t, [f"item-{n:02}" for n in range(MASS_DELETE_DOCUMENTS)])).values())
    await t.load()
    t.take()
    await t.play.trouble(truncated=True)
    first = await t.attempt("sweep", within_seconds=TRUNCATED_SECONDS)
    guard = any("none is deleted" in str(problem) for problem in first.get("problems", ()))
    refused = "waiting" in first or "error" in first
    complete = first.get("listed", 0) >= len(ids)
    require(guard or refused or complete, "a listing that lacks most documents raised no guard")
    if guard:
        outcome = await t.attempt("allow_mass_delete")
        still = any("still there" in str(problem) for problem in outcome.get("problems", ()))
        require(still, "what was missing from the listing was not looked for by name")
    await t.wait_for_ledger()
    deleted = [m for m in t.take() if isinstance(m, DocumentDeleted)]
    require(not deleted, f"a truncated listing deleted {len(deleted)} documents")
    await t.play.trouble()
    await t.run("sweep")
    require(ids <= await t.alive(), "documents are missing after a truncated listing")
    if guard:
        return f"{MASS_DELETE_DOCUMENTS} documents: the guard asked, each was looked for by name, and none was deleted"
    return "the source refuses a truncated listing" if refused else "the source has no listing that can be truncated"


async def stamps(t: Trial) -> str:
    """Every message carries a time before the request that its content comes from, and nothing is read ahead: a change
    between two pages is in the later one."""
    ids = await write_documents(t)
    edited: dict[str, datetime] = {}

    async def before(method: str, number: int) -> None:
        if method == "full" and number == 1 and not edited:
            seen = {id_ for call in t.record.pages("full") for id_ in call.ids}
            for name, id_ in ids.items():
                if id_ not in seen:
                    await t.play.write(name, text(name, "An echidna was added here."))
                    edited[id_] = datetime.now(UTC)

    t.record.before = before
    await t.load()
    t.record.before = None
    messages = [m for m in t.take() if isinstance(m, DocumentMessage)]
    for message in messages:
        request_times = [call.requested_at for call in t.record.calls if message.external_id in call.ids]
        require(
            any(message.observed_at <= at for at in request_times),
            "a message carries a time after the request to its source",
        )
    upserts = [m for m in messages if isinstance(m, DocumentUpserted)]
    stale = [
        m
        for m in upserts
        if m.external_id in edited and m.observed_at > edited[m.external_id] and "echidna" not in m.content
    ]
    require(not stale, f"{len(stale)} messages have content that was read before they were stamped")
    return f"{len(messages)} messages; {len(edited)} documents changed between two pages"


LAWS_OF_FAILURE: dict[str, Law] = {
    "webhook-lost": webhook_lost,
    "webhook-doubled": webhook_doubled,
    "cursor-expired": cursor_expired,
    "throttled": throttled,
    "crash": crash,
    "truncated-listing": truncated,
    "stamps": stamps,
}

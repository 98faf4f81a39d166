"""What every connector keeps, whatever its source: each law tries it on a playground and returns what it saw."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from connectors.conform.trial import Broken, Trial
from connectors.source import Document, Gone, Listed, Unreadable
from topics.messages import AnyMessage, DocumentDeleted, DocumentMessage, DocumentUpserted

Law = Callable[[Trial], Awaitable[str]]
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")


def text(name: str, more: str = "") -> str:
    """A few paragraphs."""
    return "\n\n".join(
        [f"This is what {name} is about: the {name} of the company, and how to work with it."]
        + [f"Section {n} of {name} tells about part {n} of it, in a sentence or two that say enough." for n in (1, 2)]
        + ([more] if more else [])
    )


async def written(t: Trial, names: Sequence[str] = NAMES) -> dict[str, str]:
    """name → external id."""
    return {name: await t.play.write(name, text(name)) for name in names}


def told(messages: Sequence[AnyMessage]) -> str:
    """For people: how many of what."""
    kinds = [message.kind.split(".")[1] for message in messages]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) or "nothing"


def about(messages: Sequence[AnyMessage]) -> set[str]:
    return {message.external_id for message in messages if isinstance(message, DocumentMessage)}


def require(holds: bool, why: str) -> None:
    if not holds:
        raise Broken(why)


async def first_crawl(t: Trial) -> str:
    """Everything arrives, for those who may read it and nobody else."""
    ids = set((await written(t)).values())
    await t.loaded()
    alive, inside, outside = await t.alive(), await t.readable(t.play.inside), await t.readable(t.play.outside)
    require(ids <= alive, f"{len(ids - alive)} of {len(ids)} documents did not arrive")
    require(ids <= inside, f"{len(ids - inside)} of {len(ids)} documents cannot be read by who may")
    require(not outside, f"{len(outside)} documents can be read by who may not")
    return f"{len(alive)} documents, all of them readable inside, none outside"


async def no_change(t: Trial) -> str:
    """When nothing has changed, polling, sweeping, listing groups and reading everything again publish nothing."""
    await written(t)
    await t.loaded()
    t.take()
    await t.asked("changes", "sweep", "groups", "full")
    found = t.take()
    require(not found, f"published {told(found)} although nothing had changed")
    return "0 published by changes, sweep, groups and full"


async def edit(t: Trial) -> str:
    """An edit is published once, with its new text, by the next poll."""
    ids = await written(t)
    await t.loaded()
    t.take()
    await t.play.write("beta", text("beta", "A quokka was added here."))
    await t.asked("changes")
    found = t.take()
    upserts = [m for m in found if isinstance(m, DocumentUpserted)]
    require(about(found) == {ids["beta"]}, f"of one edit the poll published {told(found)}")
    require(len(upserts) == 1, f"of one edit the poll published {told(found)}")
    require("quokka" in upserts[0].content, "what was published of the edit lacks its new text")
    await t.asked("changes", "sweep")
    require(not (later := t.take()), f"after the edit {told(later)} more was published")
    return "1 upsert, once"


async def move(t: Trial) -> str:
    """Renamed or put elsewhere, it is the same document still."""
    ids = await written(t)
    await t.loaded()
    before = await t.alive()
    t.take()
    await t.play.move("gamma")
    await t.asked("changes", "sweep")
    found = t.take()
    require(not [m for m in found if isinstance(m, DocumentDeleted)], "a move was published as a delete")
    gained = await t.alive() - before
    require(ids["gamma"] in await t.alive(), "a moved document is gone")
    require(ids["gamma"] not in gained, "a moved document has become another one")
    require(ids["gamma"] in await t.readable(t.play.inside), "a moved document cannot be read any more")
    return f"the same id; {told(found)}"


async def delete(t: Trial) -> str:
    """What is removed is gone, and nothing else."""
    ids = await written(t)
    await t.loaded()
    before = await t.alive()
    t.take()
    await t.play.remove("delta")
    await t.asked("changes", "sweep")
    found = t.take()
    alive = await t.alive()
    require(ids["delta"] not in alive, "a removed document is still there")
    lost = before - alive - {ids["delta"]}
    require(not lost, f"with one removed document {len(lost)} others went")
    await t.asked("changes", "sweep")
    require(not (later := t.take()), f"after the delete {told(later)} more was published")
    return told(found)


async def restore(t: Trial) -> str:
    """What is brought back, as it was, is there again: an older version than its delete's does not keep it away."""
    ids = await written(t)
    await t.loaded()
    await t.play.remove("delta")
    await t.asked("changes", "sweep")
    require(ids["delta"] not in await t.alive(), "a removed document is still there")
    t.take()
    await t.play.restore("delta")
    await t.asked("changes", "sweep")
    require(ids["delta"] in await t.readable(t.play.inside), "a restored document is not there again")
    return told(t.take())


async def restricted(t: Trial) -> str:
    """Withdrawn, at a parent where access is inherited: gone for who lost it, found by polling and sweeping alone."""
    ids = await written(t)
    await t.loaded()
    require(ids["zeta"] in await t.readable(t.play.inside), "it could not be read to begin with")
    t.take()
    await t.play.restrict("zeta")
    await t.asked("changes", "groups", "sweep")
    require(ids["zeta"] not in await t.readable(t.play.inside), "a withdrawn document can still be read")
    require(not await t.readable(t.play.outside), "who may not read anything can read something now")
    found = t.take()
    require(bool(found), "nothing was published of it")
    return told(found)


async def member_removed(t: Trial) -> str:
    """Who loses the membership loses the documents, and no document is published for it."""
    ids = set((await written(t)).values())
    await t.loaded()
    require(ids <= await t.readable(t.play.inside), "they could not be read to begin with")
    t.take()
    await t.play.leave()
    await t.asked("groups")
    found = t.take()
    left = ids & await t.readable(t.play.inside)
    require(not left, f"{len(left)} documents can still be read by who left")
    upserts = [m for m in found if isinstance(m, DocumentUpserted)]
    require(not upserts, f"{len(upserts)} documents were published again for a change of membership")
    return told(found)


async def slim_is_full(t: Trial) -> str:
    """A sweep lists exactly what a full read reads, under the same access and revision."""
    await written(t)
    await t.play.restrict("zeta")
    await t.loaded()  # what the runner does by itself is over
    assert t.instance is not None
    source = t.instance.source
    assert source is not None
    read: dict[str, Document | Unreadable] = {}
    async for page in source.full(None):
        read |= {entry.external_id: entry for entry in page.entries if not isinstance(entry, Gone)}
    listed: dict[str, Listed] = {}
    async for entries in source.slim():
        listed |= {entry.external_id: entry for entry in entries}
    require(bool(read), "nothing was read")
    only = f"{len(read.keys() - listed.keys())} are only read, {len(listed.keys() - read.keys())} only listed"
    require(read.keys() == listed.keys(), only)
    for id_, entry in read.items():
        same = (set(entry.acl_tags), set(entry.required_tags)) == (
            set(listed[id_].acl_tags), set(listed[id_].required_tags),
        )  # fmt: skip
        require(same, "a document is read under another access than it is listed under")
        require(
            entry.revision == listed[id_].revision, "a document is read with another revision than it is listed with"
        )
    return f"{len(read)} documents in both"


LAWS: dict[str, Law] = {
    "first-crawl": first_crawl,
    "no-change": no_change,
    "edit": edit,
    "move": move,
    "delete": delete,
    "restore": restore,
    "restricted": restricted,
    "member-removed": member_removed,
    "slim-is-full": slim_is_full,
}

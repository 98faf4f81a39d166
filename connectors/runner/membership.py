"""Who holds which tags, groups within groups resolved. Pure."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from connectors.runner.compare import is_tag
from pipeline.core.identity import OWN_TAG


@dataclass(frozen=True, slots=True)
class Held:
    """Who holds one tag, as the source last said."""

    tag: str
    members: tuple[str, ...]
    of: tuple[str, ...]
    observed_at: datetime


def merged(
    known: Mapping[str, Held], listed: Iterable[Held], at: datetime, asked: Collection[str] | None
) -> dict[str, Held]:
    """After a listing that was asked for at ``at``. asked: its tags; None: all of them. A complete listing takes away
    tags that it lacks; a tag that was asked for and is not listed has no holders any more. What was listed later than
    ``at`` by another call stays."""
    after = dict(known)
    if asked is None:
        after = {tag: held for tag, held in known.items() if held.observed_at > at}
        kept = set(after)
    else:
        listed = [*(Held(tag, (), (), at) for tag in sorted(set(asked))), *listed]
        kept = {tag for tag, held in known.items() if held.observed_at > at}
    return after | {held.tag: held for held in listed if held.tag not in kept}


def holders(groups: Mapping[str, Held]) -> dict[str, frozenset[str]]:
    """principal → all tags that it holds. Cycles are tolerated: tags that hold each other have the same holders."""
    upward: dict[str, list[str]] = defaultdict(list)
    direct: dict[str, set[str]] = defaultdict(set)
    for tag, held in groups.items():
        for principal in held.members:
            direct[principal].add(tag)
        for inner in held.of:
            if inner.startswith(OWN_TAG):
                direct[inner.removeprefix(OWN_TAG)].add(tag)
            else:
                upward[inner].append(tag)
    return {principal: _closure(tags, upward) for principal, tags in direct.items() if is_tag(principal)}


def _closure(tags: set[str], upward: Mapping[str, list[str]]) -> frozenset[str]:
    found, pending = set(tags), list(tags)
    while pending:
        for outer in upward.get(pending.pop(), ()):
            if outer not in found:
                found.add(outer)
                pending.append(outer)
    return frozenset(tag for tag in found if is_group(tag))


def is_group(tag: str) -> bool:
    """Whether the tag may be a group's: ``user:NAME`` is NAME's alone."""
    return is_tag(tag) and not tag.startswith(OWN_TAG)


def digest(tags: Collection[str]) -> bytes:
    """SHA-256 of the set."""
    return hashlib.sha256(json.dumps(sorted(tags), ensure_ascii=False).encode()).digest()

"""A small library that reads like a company's own: a guide, a wiki, runbooks; and what somebody hostile would write."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from tests.support.query.library import document
from topics.messages import DocumentUpserted

UNDO = """\
# Undoing commits

Use `git revert` to undo a commit that others already have: it records a new commit whose changes are the opposite of
the old one's. History stays as it was, so nobody who pulled it is surprised.

```
git revert HEAD~3
```

For a commit that was never pushed, `git reset --soft HEAD~1` takes the commit back and keeps its changes staged. With
`--hard` the changes are thrown away too, and only the reflog still knows them, for about ninety days.

## When the commit is a merge

Reverting a merge needs a parent: `git revert -m 1 MERGE` says which side of the merge is the mainline. The branch
cannot be merged again afterwards unless the revert is itself reverted.
"""
RESET = """\
# Reset, restore and revert

A reset moves the branch to another commit. Soft keeps the index and the files, mixed (the default) resets the index,
hard resets both. To undo a hard reset, look into the reflog: it lists where HEAD has been, and every commit in it can
still be checked out.

Restore brings back files and leaves the branch alone. Revert adds a commit that undoes another one.
"""
RELEASE = """\
# Rolling back a release

When a release misbehaves, undo its commit on the main branch: revert the release commit, let the pipeline build, and
publish the previous image at once, without waiting for the build. Say in the channel what was rolled back and why.

1. Freeze merges.
2. Publish the previous image.
3. Revert the release commit.
"""
REBASE = """\
# Rewriting history

An interactive rebase squashes, reorders and drops commits that only you have. Commits that others have pulled are
better reverted than rewritten: their history would no longer agree with yours.
"""
STASH = """\
# Putting work aside

The stash keeps changes that are not ready to be committed. Apply brings them back and keeps the entry, pop brings them
back and drops it.
"""
REVIEW = """\
# Code review

Two people read every change to the release branch; one of them owns the code. A review that waits longer than a day is
asked for again in the channel.
"""
EXPENSES = """\
# Travel expenses

Hand in receipts within thirty days. Trains are booked second class, flights only above six hundred kilometres.
"""
HOSTILE = """\
# Quarterly harvest <script>window.harmed = 'script'</script>

Turnips <img src=x onerror="window.harmed='image'"> and ![beets](http://harm.invalid/pixel.png) were stored in the
cellar. <svg onload="window.harmed='svg'"></svg> [Details](javascript:window.harmed='link') follow. <style>body {
display: none }</style> <iframe src="http://harm.invalid/"></iframe>
"""


def _at(days: float) -> datetime:
    return datetime(2026, 11, 20, 12, tzinfo=UTC) - timedelta(days=days)


def _flowing(text: str) -> str:
    """A paragraph on one line: a model that copies copies lines."""
    blocks = text.split("\n\n")
    return "\n\n".join(b if re.match(r"```|\d\.", b) else b.replace("\n", " ").strip() for b in blocks) + "\n"


def documents() -> list[DocumentUpserted]:
    guide = {"source": "git-guide", "author": "Ann Archer", "media_type": "text/markdown"}
    wiki = {"source": "wiki", "author": "Ben Okri", "media_type": "text/html"}
    return [
        document(
            "guide/undo.md",
            _flowing(UNDO),
            title="Undoing things",
            source_url="https://git.example.com/guide/undo",
            source_modified_at=_at(3),
            **guide,
        ),
        document(
            "guide/reset.md",
            _flowing(RESET),
            title="Reset, restore and revert",
            source_url="https://git.example.com/guide/reset",
            source_modified_at=_at(40),
            **guide,
        ),
        document(
            "guide/rebase.md",
            _flowing(REBASE),
            title="Rewriting history",
            source_modified_at=_at(41),
            source_url="https://git.example.com/guide/rebase",
            **guide,
        ),
        document(
            "guide/stash.md",
            _flowing(STASH),
            title="Putting work aside",
            source_modified_at=_at(42),
            source_url="file:///srv/guide/stash.md",
            **guide,
        ),
        document(
            "wiki/reset",
            _flowing(RESET),
            title="Reset (copied from the guide)",
            source_url="https://wiki.example.com/reset",
            source_modified_at=_at(300),
            **wiki,
        ),
        document(
            "wiki/review",
            _flowing(REVIEW),
            title="Code review",
            source_modified_at=_at(12),
            source_url="https://wiki.example.com/review",
            **wiki,
        ),
        document(
            "runbooks/rollback",
            _flowing(RELEASE),
            title="Rolling back a release",
            source="runbooks",
            author="Chidi Anagonye",
            media_type="text/markdown",
            source_url="https://runbooks.example.com/rollback",
            source_modified_at=_at(1),
        ),
        document(
            "hr/expenses.pdf",
            _flowing(EXPENSES),
            title="Travel expenses",
            source="handbook",
            media_type="application/pdf",
            source_url="https://handbook.example.com/expenses",
            source_modified_at=_at(200),
        ),
        document(
            "harm/\u202efdp.exe",
            _flowing(HOSTILE),
            title="Harvest <img src=x onerror=\"window.harmed='title'\"> of \u202efdp.exe",
            source="outside",
            author="<b onmouseover=alert(1)>Mallory</b>",
            source_url="javascript:window.harmed='url'",
            source_modified_at=_at(5),
        ),
        document(
            "secret",
            "# Undoing commits in secret\n\nThe board undoes commits by decree.",
            title="For the board",
            acl_tags=["board"],
            source="wiki",
        ),
    ]

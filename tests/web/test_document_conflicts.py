"""Contradictions in the drawer of a document, for its readers, in a real browser over the real stores."""

from __future__ import annotations

import pytest

from pipeline.core.identity import document_id
from tests.support.query.library import deletion, document
from tests.web.conftest import Site, Tabs
from tests.web.test_accessible import faults

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="session")]

CONFLICT = (
    "INSERT INTO conflicts (id, tenant, generation, kind, document_a, document_b, chunk_a, chunk_b, places)"
    " SELECT gen_random_uuid(), 'acme', g.name, %s, %s, %s, m.chunk_ids[1], n.chunk_ids[1], '[]'"
    " FROM generations g JOIN manifests m ON m.generation = g.name JOIN manifests n ON n.generation = g.name"
    " WHERE g.state = 'active' AND m.document_id = %s AND n.document_id = %s RETURNING id"
)


async def test_readers_see_and_decide_what_contradicts_a_document_if_they_may_read_both(tabs: Tabs, site: Site) -> None:
    shared, other, secret = made = [
        document("ferry.md", "The ferry to Ebeltoft sails 7 times a day.", acl_tags=["user:ann", "user:bea"]),
        document("harbour.md", "The ferry to Ebeltoft sails 8 times a day.", acl_tags=["user:ann", "user:bea"]),
        document("secret.md", "The ferry to Ebeltoft does not sail.", acl_tags=["user:bea"]),
    ]
    await site.library.put(*made)
    ids = {of.external_id: document_id(of.tenant, of.source, of.external_id) for of in made}
    for kind, against in (("number", other), ("negation", secret)):
        both = sorted([ids[shared.external_id], ids[against.external_id]])
        await site.library.execute(CONFLICT, kind, *both, *both)
    panel = "#story .panel:has-text('Contradictions and copies')"
    tab = await tabs.new(who="ann")
    await tab.open(f"?doc={ids[shared.external_id]}")
    await tab.page.wait_for_selector("#story .timeline")
    assert await tab.page.locator(f"{panel} li").count() == 1, "of the other one she may read one side only"
    assert await faults(tab) == []
    entry = tab.page.locator(f"{panel} li:has-text('Different numbers')")
    await entry.locator("summary").click()
    assert "sails 8 times a day" in await entry.inner_text()
    await entry.get_by_text("Accept", exact=True).click()
    await entry.wait_for(state="detached")
    await tab.page.wait_for_selector("#story .timeline")
    assert await tab.page.locator(panel).count() == 0
    states = await site.library.execute("SELECT state, count(*) FROM conflict_decisions GROUP BY state")
    assert ("accepted", 1) in states
    tab = await tabs.new(who="bea")
    await tab.open(f"?doc={ids[shared.external_id]}")
    await tab.page.wait_for_selector(f"{panel} li:has-text('Denied on one side')")
    await site.library.put(*(deletion(of) for of in made))

"""Subscriptions to change notifications."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from connectors.sharepoint.changes import Subscriptions
from connectors.source import Refused, Request
from tests.support.connectors.sharepoint_kit import EVENTS, office_in


async def test_a_subscription_is_renewed_before_its_end_and_refuses_a_forged_notification(tmp_path: Path) -> None:
    async with office_in(tmp_path) as office:
        source = office.source()
        drives = await source._drives.selected()

        def subscriptions() -> Subscriptions:
            return Subscriptions(source._graph, office.memory, office.tenant.now)  # as after a restart

        renewal = await subscriptions().renew(drives, EVENTS)
        assert renewal is not None
        [opened] = office.fake.subscriptions.values()
        end = opened.expires_at
        assert end - renewal == timedelta(days=3)

        office.file("a.txt")
        [body] = office.fake.take()
        reaction, renews_now = await subscriptions().reaction(Request({}, {}, body))
        assert reaction.changes
        assert not renews_now
        forged = json.loads(body)
        forged["value"][0]["clientState"] = "guessed"
        with pytest.raises(Refused):
            await subscriptions().reaction(Request({}, {}, json.dumps(forged).encode()))

        office.tenant.advance(renewal - office.tenant.now())
        await subscriptions().renew(drives, EVENTS)
        [renewed] = office.fake.subscriptions.values()
        assert renewed.id == opened.id
        assert renewed.expires_at > end

        office.tenant.advance(renewed.expires_at - office.tenant.now())
        with pytest.raises(Refused):
            await subscriptions().reaction(Request({}, {}, body))

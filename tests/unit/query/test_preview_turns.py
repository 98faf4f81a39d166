"""Previews run one at a time, and no tenant keeps the others out."""

from __future__ import annotations

import asyncio

import pytest

from query.preview.turns import Busy, Turns


async def test_a_tenant_that_repeats_its_previews_without_a_pause_keeps_no_other_out() -> None:
    turns, had = Turns(), list[str]()

    async def noisy() -> None:
        while len(had) < 20:
            try:
                async with turns.of("noisy", 5):
                    had.append("noisy")
                    await asyncio.sleep(0.01)
            except Busy:
                await asyncio.sleep(0)

    async def quiet() -> None:
        await asyncio.sleep(0.005)
        async with turns.of("quiet", 5):
            had.append("quiet")

    await asyncio.gather(noisy(), noisy(), noisy(), quiet())
    assert had[:3] == ["noisy", "quiet", "noisy"]


async def test_a_tenant_has_one_place_and_gives_it_back() -> None:
    turns = Turns()
    async with turns.of("a", 1):
        with pytest.raises(Busy):
            async with turns.of("a", 1):
                pass
        with pytest.raises(Busy):
            async with turns.of("b", 0.01):
                pass
    async with asyncio.timeout(5):
        for tenant in "ab":
            async with turns.of(tenant, 1):
                pass

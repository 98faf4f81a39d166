"""One request sent away holds all of them; waiting ends at the deadline."""

from __future__ import annotations

import asyncio
import time

import pytest

from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.embedding.failures import Alone, ThrottledAlone
from pipeline.embedding.pace import Pace, Place, Throttled


def deadline_in(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


async def test_no_request_starts_until_the_retry_after_of_a_throttled_one_has_passed() -> None:
    pace = Pace(parallel=4, base_seconds=0.01)
    throttled_until = 0.0
    starts: list[float] = []

    async def throttled_once(_place: Place) -> None:
        nonlocal throttled_until
        if not throttled_until:
            throttled_until = time.monotonic() + 0.2
            raise Throttled("slow down", retry_after=0.2)

    async def other(_place: Place) -> None:
        starts.append(time.monotonic())

    first = asyncio.create_task(pace.run(throttled_once, size=1, deadline=deadline_in()))
    while not throttled_until:
        await asyncio.sleep(0)
    await asyncio.gather(*(pace.run(other, size=1, deadline=deadline_in()) for _ in range(8)))
    await first
    assert len(starts) == 8
    assert min(starts) >= throttled_until


async def test_a_retry_after_of_zero_still_backs_off() -> None:
    pace = Pace(parallel=4, base_seconds=0.5)
    request_count = 0

    async def never(_place: Place) -> None:
        nonlocal request_count
        request_count += 1
        raise Throttled("slow down", retry_after=0.0)

    with pytest.raises(Retryable):
        await pace.run(never, size=1, deadline=deadline_in(1.0))
    assert request_count < 100, "without any pause it would be thousands"


async def test_a_failed_request_does_not_delay_the_others() -> None:
    pace = Pace(parallel=4, base_seconds=10.0)
    failed = asyncio.Event()

    async def fails(_place: Place) -> None:
        failed.set()
        raise Retryable("500")

    async def other(_place: Place) -> str:
        return "done"

    waiting = asyncio.create_task(pace.run(fails, size=1, deadline=deadline_in(60)))
    await failed.wait()
    assert await asyncio.wait_for(pace.run(other, size=1, deadline=deadline_in()), 1) == "done"
    waiting.cancel()


async def test_a_request_is_retried_until_the_deadline_and_the_error_says_how_long_to_wait() -> None:
    attempts = 0

    async def request(_place: Place) -> None:
        nonlocal attempts
        attempts += 1
        raise Retryable("down")

    started = time.monotonic()
    with pytest.raises(Retryable, match="down") as caught:
        await Pace(parallel=1, base_seconds=0.02).run(request, size=1, deadline=started + 0.2)
    assert time.monotonic() - started < 0.5
    assert attempts > 1
    assert caught.value.retry_after is not None


async def test_a_past_deadline_still_allows_one_attempt() -> None:
    async def request(_place: Place) -> str:
        return "done"

    assert await Pace(parallel=1, base_seconds=0.01).run(request, size=1, deadline=time.monotonic() - 1) == "done"


async def test_a_request_that_fails_alone_is_not_retried_until_its_deadline() -> None:
    """The documents that were embedded with it waited for twenty seconds, six times, until they were tried without."""
    pace = Pace(parallel=4, base_seconds=0.01)
    others = 0

    async def fails(_place: Place) -> None:
        raise Retryable("500")

    async def other(_place: Place) -> None:
        nonlocal others
        others += 1

    waiting = asyncio.create_task(pace.run(fails, size=1, deadline=deadline_in(60)))
    while not waiting.done():
        await pace.run(other, size=1, deadline=deadline_in())
        await asyncio.sleep(0.01)
    with pytest.raises(Alone, match="500"):
        await waiting
    assert others >= 3


async def test_a_request_that_is_always_throttled_alone_holds_up_no_other() -> None:
    pace = Pace(parallel=4, base_seconds=0.01)
    wait = 0.01

    async def throttled(_place: Place) -> None:
        raise Throttled("too large", retry_after=wait)

    async def other(_place: Place) -> None:
        pass

    waiting = asyncio.create_task(pace.run(throttled, size=1, deadline=deadline_in(60), of=b"large"))
    while not waiting.done():
        await pace.run(other, size=1, deadline=deadline_in())
        await asyncio.sleep(0)
    with pytest.raises(ThrottledAlone):
        await waiting
    wait = 60.0
    with pytest.raises(ThrottledAlone) as caught:
        await pace.run(throttled, size=1, deadline=deadline_in(), of=b"large")
    assert caught.value.retry_after == 60.0
    async with asyncio.timeout(5):
        await pace.run(other, size=1, deadline=deadline_in(1))
    with pytest.raises(Deferred) as again:
        await pace.run(throttled, size=1, deadline=deadline_in(), of=b"another")
    assert not again.value.alone, "the server may mean the whole client"


async def test_a_request_that_fails_alone_is_recognised_although_little_else_is_sent() -> None:
    """Between its tries no three others were answered, so it stayed one of those that the server may mean the whole
    client by: each 429 held up every other request, without end."""
    pace = Pace(parallel=4, base_seconds=0.01)

    async def throttled(_place: Place) -> None:
        raise Throttled("too large", retry_after=0.05)

    async def other(_place: Place) -> None:
        pass

    alone = []
    for _ in range(6):
        with pytest.raises(Retryable) as caught:
            await pace.run(throttled, size=1, deadline=deadline_in(0.3), of=b"large")
        alone.append(caught.value.alone)
        await pace.run(other, size=1, deadline=deadline_in())
    assert (alone[0], alone[-2:]) == (False, [True, True])


async def test_what_failed_in_an_outage_does_not_count_as_failing_alone_after_it() -> None:
    pace = Pace(parallel=4, base_seconds=0.01)
    is_down = True

    async def request(_place: Place) -> None:
        if is_down:
            raise Retryable("down")

    async def fails(_place: Place) -> None:
        raise Retryable("down")

    for _ in range(5):
        for name in (b"a", b"b", b"c", b"d"):
            with pytest.raises(Retryable):
                await pace.run(request, size=1, deadline=deadline_in(0.01), of=name)
    is_down = False
    for name in (b"b", b"c", b"d"):
        await pace.run(request, size=1, deadline=deadline_in(), of=name)
    with pytest.raises(Retryable) as caught:
        await pace.run(fails, size=1, deadline=deadline_in(0.01), of=b"a")
    assert not caught.value.alone


@pytest.mark.parametrize("failure", [Retryable("down"), Throttled("slow down", retry_after=0.01)])
async def test_a_request_is_retried_until_its_deadline_while_no_other_is_answered(failure: Retryable) -> None:
    pace = Pace(parallel=4, base_seconds=0.01)
    ends = deadline_in(0.5)

    async def fails(_place: Place) -> None:
        raise failure

    results = await asyncio.gather(
        *(pace.run(fails, size=1, deadline=ends, of=b"%d" % n) for n in range(8)), return_exceptions=True
    )
    assert [getattr(error, "alone", None) for error in results] == [False] * 8
    assert time.monotonic() > ends - 0.3


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("failure", [Retryable("500"), Throttled("slow down", retry_after=0.01)])
async def test_a_probe_takes_the_turn_of_a_request_that_fails_while_no_other_is_answered(
    failure: Retryable, is_there: bool
) -> None:
    """In an outage it is no request more; and a limit may have room for it alone."""
    pace = Pace(parallel=1, base_seconds=0.001)
    sent: list[str] = []

    async def fails(_place: Place) -> None:
        sent.append("request")
        raise failure

    async def probe(_place: Place) -> None:
        sent.append("probe")
        if not is_there:
            raise Retryable("503")

    with pytest.raises(Retryable) as caught:
        await pace.run(fails, size=1, deadline=deadline_in(0.5), of=b"a", probe=probe)
    if isinstance(failure, Deferred):
        assert "probe" not in sent
    else:
        assert sent[:4] == ["request"] * 3 + ["probe"]
        assert sent.count("probe") == 1
    assert caught.value.alone == (is_there and "probe" in sent)


async def test_misconfigured_errors_are_not_retried() -> None:
    attempts = 0

    async def request(_place: Place) -> None:
        nonlocal attempts
        attempts += 1
        raise Misconfigured("wrong key")

    with pytest.raises(Misconfigured):
        await Pace(parallel=1, base_seconds=0.01).run(request, size=1, deadline=deadline_in())
    assert attempts == 1


async def test_a_slot_released_early_is_free_for_the_next_request_once() -> None:
    pace = Pace(parallel=1, base_seconds=0.01)
    begun: list[str] = []
    read = asyncio.Event()

    async def reads(place: Place) -> str:
        begun.append("first")
        place.give_back()
        place.give_back()
        await read.wait()
        return "first"

    async def holds(_place: Place) -> str:
        begun.append("other")
        await read.wait()
        return "other"

    first = asyncio.create_task(pace.run(reads, size=1, deadline=deadline_in()))
    others = [asyncio.create_task(pace.run(holds, size=1, deadline=deadline_in())) for _ in range(2)]
    while len(begun) < 2:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert begun == ["first", "other"], "one place, given back once"
    read.set()
    assert await asyncio.gather(first, *others) == ["first", "other", "other"]

"""The faults. Each breaks one part of a World for a while, and restores it."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from random import Random
from urllib.parse import urlsplit

import psutil
import psycopg

from tests.faults import tally
from tests.faults.kafka_logs import lose_the_tail, more_partitions, recreate_topic
from tests.faults.world import BUILD, CUT_OVER, SESSION_SECONDS, WORKERS, World, no_faults

Fault = Callable[[World, Random], Awaitable[None]]


async def kill(world: World, rng: Random) -> None:
    async with world.reserve_workers(rng.choice(world.workers)) as names:
        for name in names:
            await world.end(name, signal.SIGKILL)
            tally.FAULTS[f"kill of {name}"] += 1
            await asyncio.sleep(rng.random() / 2)
            await world.start(name)


async def kill_all(world: World, rng: Random) -> None:
    """Kill all workers at once, as when their machine loses power."""
    async with world.reserve_workers(*world.workers) as names:
        for name in names:
            tally.FAULTS[f"kill of {name}"] += 1
        await asyncio.gather(*(world.end(name, signal.SIGKILL) for name in names))
        await asyncio.gather(*(world.start(name) for name in names))


async def kill_connectors(world: World, rng: Random) -> None:
    """Kill the connectors' worker a few times in a row: anywhere while it reads its sources, or between Kafka's
    acknowledgement and the row that records it."""
    for _ in range(rng.randint(1, 3)):
        async with world.reserve_workers("connectors") as names:
            for name in names:
                await world.end(name, signal.SIGKILL)
                if rng.random() < 2 / 3:
                    await _die_after_sending(world, name, rng)
                tally.FAULTS[f"kill of {name}"] += 1
                await asyncio.sleep(rng.random() * 3)
                await world.start(name)
        await asyncio.sleep(rng.random() * 2)


async def _die_after_sending(world: World, name: str, rng: Random) -> None:
    await world.start(name, kill_environment={"FAULTS_SENDS": str(rng.randint(1, 4))})
    if (process := world.space.processes.get(name)) is None:
        return
    for _ in range(100):
        if process.poll() is not None:
            tally.FAULTS["kill between Kafka's acknowledgement and the row"] += 1
            if world.during_outage is not None:
                await world.during_outage()
            break
        await asyncio.sleep(0.1)
    await world.end(name, signal.SIGKILL)


async def kill_at_an_await(world: World, rng: Random) -> None:
    """A second worker of a stage joins, and is killed in the middle of its work."""
    name = world.helper(rng.choice(WORKERS))
    await world.start(name, kill_environment={"FAULTS_AWAIT": str(rng.randint(3, 60))})
    if (process := world.space.processes.get(name)) is None:
        return
    for _ in range(40):
        if process.poll() is not None:
            break
        await asyncio.sleep(0.1)
    died = process.poll() is not None
    tally.FAULTS["kill at an await" if died else "kill of an idle worker"] += 1
    await world.end(name, signal.SIGKILL)


async def stop_and_continue(world: World, rng: Random) -> None:
    """Pause a worker with SIGSTOP for longer than its session, so that its partitions go to another worker."""
    async with world.reserve_workers(rng.choice(world.workers)) as names:
        for name in names:
            if rng.random() < 0.5:
                await world.start(world.helper(name))
            world.space.processes[name].send_signal(signal.SIGSTOP)
            await asyncio.sleep(SESSION_SECONDS + 1.5)
            world.space.processes[name].send_signal(signal.SIGCONT)
            tally.FAULTS["stop for longer than the session"] += 1


async def drain(world: World, rng: Random) -> None:
    async with world.reserve_workers(rng.choice(world.workers)) as names:
        for name in names:
            await world.end(name, signal.SIGTERM)
            tally.FAULTS["stop by SIGTERM in mid-work"] += 1
            await world.start(name)


async def join_and_leave(world: World, rng: Random) -> None:
    name = world.helper(rng.choice(world.workers))
    await world.start(name)
    tally.FAULTS["rebalance: one joins"] += 1
    await asyncio.sleep(rng.random())
    await world.end(name, rng.choice((signal.SIGTERM, signal.SIGKILL)))
    tally.FAULTS["rebalance: one leaves"] += 1


async def restart_service(world: World, name: str) -> None:
    async with world.server_locks[name]:
        await asyncio.to_thread(world.stack.kill, name)
        tally.FAULTS[f"kill of the server {name}"] += 1
        await asyncio.to_thread(world.stack.start, name)


async def kill_postgres(world: World, rng: Random) -> None:
    await restart_service(world, "postgres")


async def kill_elasticsearch(world: World, rng: Random) -> None:
    await restart_service(world, "elasticsearch")


async def kill_kafka(world: World, rng: Random) -> None:
    await restart_service(world, "kafka")


async def freeze_a_server(world: World, rng: Random) -> None:
    """Pause a server with SIGSTOP: its connections stay open without a response; then it continues."""
    name = rng.choice(("postgres", "elasticsearch", "kafka"))
    async with world.server_locks[name]:
        processes = world.server_processes(name)
        try:
            for process in processes:
                process.suspend()
            tally.FAULTS[f"the server {name} frozen (SIGSTOP)"] += 1
            await asyncio.sleep(1 + rng.random() * 7)
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()


async def cut(world: World, rng: Random) -> None:
    """Cut all connections to a service, once or a few times in a row."""
    name = rng.choice(tuple(world.proxies))
    for _ in range(rng.randint(1, 3)):
        world.proxies[name].cut()
        tally.FAULTS[f"connections to {name} cut"] += 1
        await asyncio.sleep(rng.random() * 0.4)


async def unreachable(world: World, rng: Random) -> None:
    name = rng.choice(tuple(world.proxies))
    world.proxies[name].refusing = True
    world.proxies[name].cut()
    tally.FAULTS[f"{name} refuses connections"] += 1
    await asyncio.sleep(0.5 + rng.random() * 2)
    world.proxies[name].refusing = False


async def slow(world: World, rng: Random) -> None:
    name = rng.choice(tuple(world.proxies))
    world.proxies[name].delay_seconds = 0.02 + rng.random() * 0.1
    tally.FAULTS[f"{name} slow"] += 1
    await asyncio.sleep(1.5)
    world.proxies[name].delay_seconds = 0.0


async def swallow(world: World, rng: Random) -> None:
    """Drop packets silently: nothing arrives, and no error is reported. What was in flight arrives later, or never."""
    name = rng.choice(tuple(world.proxies))
    proxy = world.proxies[name]
    proxy.open.clear()
    tally.FAULTS[f"{name} swallows everything"] += 1
    await asyncio.sleep(1 + rng.random() * 2.5)
    if rng.random() < 0.5:
        proxy.cut()
    proxy.open.set()


async def one_way(world: World, rng: Random) -> None:
    """Interrupt one direction of a connection: requests arrive and are executed without a response, or the reverse."""
    name = rng.choice(tuple(world.proxies))
    proxy, answers = world.proxies[name], rng.random() < 2 / 3
    way = proxy.responses_open if answers else proxy.requests_open
    way.clear()
    tally.FAULTS[f"{name}: no {'answers' if answers else 'requests'} come through"] += 1
    await asyncio.sleep(1 + rng.random() * 4)
    proxy.cut()
    way.set()


async def repair(world: World, rng: Random) -> None:
    """An operator audits and repairs while the scenario runs."""
    await world.run_command("audit", "--repair", "--wait-seconds", "5", "--json")


async def rebuild(world: World, rng: Random) -> None:
    """An operator rebuilds a store while the scenario runs; the command is sometimes killed, as by a lost terminal."""
    what = rng.choice(("keywords", "vectors"))
    kill_after_seconds = 1 + rng.random() * 4 if rng.random() < 0.5 else None
    await world.run_command("rebuild", what, "--yes", "--json", kill_after_seconds=kill_after_seconds)


RECOVERY_ATTEMPTS = 20


async def recover(world: World, rng: Random) -> None:
    """An operator lets the ledger catch up with Kafka. Detect is stopped meanwhile, as the command requires."""
    async with world.reserve_workers("detect") as names:
        for name in names:
            await world.end(name, signal.SIGTERM)
            recovering = await _begin_recovery(world)
            await world.start(name)
            await recovering


async def _begin_recovery(world: World) -> asyncio.Task[bool]:
    """Start ``penstock recover`` and return it once offsets are rewound: until then detect refuses to start, then the
    command waits for detect. Run it again where another fault makes it give up before that."""
    for _ in range(RECOVERY_ATTEMPTS):
        while (before := await _recovery_state(world)) is None:
            await asyncio.sleep(0.2)
        recovering = asyncio.create_task(world.run_command("recover", "--since", "1h", "--json"))
        while not recovering.done():
            state = await _recovery_state(world)
            if state is not None and state != before and state[0] != "rewinding":
                return recovering
            await asyncio.sleep(0.2)
        state = await _recovery_state(world)
        if state is not None and state[0] != "rewinding":
            return recovering
        await asyncio.sleep(1)
    raise AssertionError("penstock recover never rewinds the offsets")


async def finish_recovery(world: World) -> None:
    """Run ``penstock recover`` again where it gave up while another fault went on: until then the ledger is fenced."""
    if await _fenced(world):
        await recover(world, Random(0))
        assert not await _fenced(world), "the ledger cannot be recovered though nothing is broken any more"


async def _fenced(world: World) -> bool:
    state = await _recovery_state(world)
    return state is not None and state[0] != "open"


async def _recovery_state(world: World) -> tuple[str, datetime] | None:
    """Return the state of a recovery and the time since when it has it; None while Postgres is unavailable."""
    try:
        [(state, at)] = await world.space.query("SELECT state, accepted_at FROM fence")
    except psycopg.OperationalError:
        return None
    return state, at


async def model_fails(world: World, rng: Random) -> None:
    knobs: tuple[dict[str, object], ...] = (
        {"throttle": 3},
        {"errors": 3},
        {"hang": 2},
        {"disconnect": 3},
        {"truncate": 2},
        {"not_json": 2},
        {"drop_row": 2},
        {"wrong_dimensions": 8},
        {"reorder": True},
        {"quota": True},
    )
    knob = rng.choice(knobs)
    world.model.faults = replace(no_faults(), **knob)  # type: ignore[arg-type]
    tally.FAULTS[f"embedding server: {next(iter(knob))}"] += 1
    await asyncio.sleep(1 + rng.random())
    world.model.faults = no_faults()


async def items_put_off(world: World, rng: Random) -> None:
    """Elasticsearch answers 429 for some items of a bulk, as a full write queue does."""
    proxy = world.proxies["elasticsearch"]
    proxy.port = urlsplit(world.es_proxy.url).port or 0
    proxy.cut()
    for _ in range(6):
        world.es_proxy.put_off = 3
        await asyncio.sleep(0.3)
    world.es_proxy.put_off = 0
    tally.FAULTS["Elasticsearch: items put off (429)"] += 1
    proxy.port = urlsplit(world.space.settings.elasticsearch.url).port or 9200
    proxy.cut()


async def elasticsearch_full(world: World, rng: Random) -> None:
    """Set the block that Elasticsearch itself sets on an index when its disk passes the flood stage."""
    block = "index.blocks.read_only_allow_delete"
    await world.set_index({block: True})
    tally.FAULTS["Elasticsearch: disk full"] += 1
    try:
        await asyncio.sleep(1 + rng.random() * 1.5)
    finally:
        await world.set_index({block: None})


async def postgres_full(world: World, rng: Random) -> None:
    """Let every new row fail as on a full disk, by a trigger that raises the error of Postgres (SQLSTATE 53100). The
    servers of the tests share one disk, which must not be filled."""
    table = rng.choice((await world.chunk_table(), "document_bodies", "index_state"))
    function = f"disk_full_{secrets.token_hex(4)}"  # its own: scenarios of one round have the same database
    await world.execute(
        f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION"
        " 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$",
        f"CREATE OR REPLACE TRIGGER {function} BEFORE INSERT ON {table} EXECUTE FUNCTION {function}()",
    )
    tally.FAULTS["Postgres: disk full"] += 1
    try:
        await asyncio.sleep(1 + rng.random() * 1.5)
    finally:
        await world.execute(f"DROP FUNCTION IF EXISTS {function}() CASCADE")


async def slow_disk(world: World, rng: Random) -> None:
    """Delay every commit of Postgres by a tenth of a second, the longest that it can be configured to wait, in place of
    a disk whose fsync is slow."""
    database = await world.database()
    await world.execute(
        f'ALTER DATABASE "{database}" SET commit_delay = 100000', f'ALTER DATABASE "{database}" SET commit_siblings = 0'
    )
    await sessions_ended(world, rng)
    tally.FAULTS["Postgres: slow disk (each commit 0.1 s)"] += 1
    await asyncio.sleep(2 + rng.random() * 4)
    await world.execute(
        f'ALTER DATABASE "{database}" RESET commit_delay', f'ALTER DATABASE "{database}" RESET commit_siblings'
    )
    await sessions_ended(world, rng)


async def stutter(world: World, rng: Random) -> None:
    """Give a server a tenth of the time, as if its disk or processor were busy with something else."""
    name = rng.choice(("postgres", "elasticsearch", "kafka"))
    async with world.server_locks[name]:
        processes = world.server_processes(name)
        tally.FAULTS[f"the server {name} slow (a tenth of the time)"] += 1
        for _ in range(rng.randint(10, 30)):
            try:
                for process in processes:
                    with suppress(psutil.NoSuchProcess):
                        process.suspend()
                await asyncio.sleep(0.18)
            finally:
                for process in processes:
                    with suppress(psutil.NoSuchProcess):
                        process.resume()
            await asyncio.sleep(0.02)


CLOCKS = {"connectors": (-3_600, -200, 20, 200), "detect": (-200, 200, 3_600)}
"""Seconds. Beyond five minutes between a connector's clock and detect's, what is observed in the future is refused, as
docs/guarantees.md says: that is no fault to recover from."""
OTHER_CLOCKS = (-3_600, -200, 200, 3_600)


async def clock_step(world: World, rng: Random) -> None:
    """The clock of a worker's machine jumps while it works, and is corrected some seconds later."""
    async with world.reserve_workers(rng.choice(world.workers)) as names:
        for name in names:
            ahead = rng.choice(CLOCKS.get(name, OTHER_CLOCKS))
            if name == "connectors":
                world.connectors_ahead_seconds = max(world.connectors_ahead_seconds, ahead)
            begins = 4 + rng.random() * 2
            seconds = 3 + rng.random() * 5
            await world.end(name, rng.choice((signal.SIGTERM, signal.SIGKILL)))
            await world.start(
                name,
                program=("-m", "tests.faults.shifted_clock"),
                more_environment={"FAULTS_CLOCK": f"{ahead},{begins},{begins + seconds}"},
            )
            tally.FAULTS[f"clock of {name} set {'forward' if ahead > 0 else 'back'}"] += 1
            await asyncio.sleep(begins + seconds)


async def next_version(world: World, rng: Random) -> None:
    """Replace a worker by one of the next version, while all others have this version, until it is started again."""
    environment = await world.next_version.environment(world)
    if not environment:
        return  # the migration could not be applied now
    async with world.reserve_workers(rng.choice(world.workers)) as names:
        for name in names:
            await world.end(name, rng.choice((signal.SIGTERM, signal.SIGKILL)))
            await world.start(name, more_environment=environment)
            tally.FAULTS[f"{name} of the next version"] += 1
            await asyncio.sleep(2 + rng.random() * 3)


async def cut_over(world: World, rng: Random) -> None:
    """An operator cuts over to a generation with other chunk sizes; its build is sometimes killed."""
    tokens = 60 if await world.chunk_tokens() == 80 else 80
    kill_after_seconds = 1 + rng.random() * 4 if rng.random() < 1 / 3 else None
    build = (*BUILD, "--chunk-tokens", str(tokens))
    if await world.run_command(*build, kill_after_seconds=kill_after_seconds):
        await world.run_command(*CUT_OVER)


async def roll_back(world: World, rng: Random) -> None:
    """An operator rolls back to the previous generation, if there is one."""
    await world.run_command("generation", "rollback", "--json")


async def sessions_ended(world: World, rng: Random) -> None:
    await world.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND application_name ~ '^penstock (intake|stores|queries|any)$'"
    )
    tally.FAULTS["Postgres: sessions ended by the administrator"] += 1


FAULTS: dict[Fault, int] = {
    kill: 12,
    kill_all: 4,
    kill_at_an_await: 14,
    stop_and_continue: 4,
    drain: 5,
    join_and_leave: 5,
    kill_postgres: 6,
    kill_kafka: 2,
    kill_elasticsearch: 2,
    cut: 12,
    unreachable: 6,
    slow: 5,
    swallow: 8,
    model_fails: 10,
    items_put_off: 5,
    elasticsearch_full: 5,
    postgres_full: 6,
    sessions_ended: 6,
    freeze_a_server: 8,
    one_way: 8,
    repair: 4,
    rebuild: 4,
    recover: 3,
    slow_disk: 4,
    stutter: 5,
    clock_step: 6,
    next_version: 5,
    cut_over: 4,
    roll_back: 2,
    more_partitions: 3,
}
"""Every fault with its weight."""


KAFKA_LOSES: dict[Fault, int] = {recreate_topic: 5, lose_the_tail: 5}
"""Faults that lose records that no worker has read: only a producer that knows what it sent can publish them again."""


def choose(rng: Random, *, kafka_loses: bool) -> list[Fault]:
    """Choose one to three faults, in one of twelve cases none. kafka_loses: whether unread records may be lost."""
    faults = FAULTS | KAFKA_LOSES if kafka_loses else FAULTS
    if rng.random() < 1 / 12:
        return []
    return rng.choices(list(faults), list(faults.values()), k=rng.randint(1, 3))

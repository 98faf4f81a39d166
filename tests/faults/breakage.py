"""The faults: each breaks one thing of a World for a while, and mends it."""

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
from tests.faults.kafka_logs import lose_the_tail, make_topic_anew, more_partitions
from tests.faults.world import BUILD, CUT_OVER, SESSION_SECONDS, WORKERS, World, mended

Fault = Callable[[World, Random], Awaitable[None]]


async def kill(world: World, rng: Random) -> None:
    async with world.taking(rng.choice(world.workers)) as names:
        for name in names:
            await world.end(name, signal.SIGKILL)
            tally.FAULTS[f"kill of {name}"] += 1
            await asyncio.sleep(rng.random() / 2)
            await world.start(name)


async def kill_all(world: World, rng: Random) -> None:
    """As when the machine loses power."""
    async with world.taking(*world.workers) as names:
        for name in names:
            tally.FAULTS[f"kill of {name}"] += 1
        await asyncio.gather(*(world.end(name, signal.SIGKILL) for name in names))
        await asyncio.gather(*(world.start(name) for name in names))


async def kill_connectors(world: World, rng: Random) -> None:
    """A few times in a row: anywhere in a look at its sources, or between Kafka's acknowledgement and the row."""
    for _ in range(rng.randint(1, 3)):
        async with world.taking("connectors") as names:
            for name in names:
                await world.end(name, signal.SIGKILL)
                if rng.random() < 2 / 3:
                    await _die_after_sending(world, name, rng)
                tally.FAULTS[f"kill of {name}"] += 1
                await asyncio.sleep(rng.random() * 3)
                await world.start(name)
        await asyncio.sleep(rng.random() * 2)


async def _die_after_sending(world: World, name: str, rng: Random) -> None:
    await world.start(name, dying={"FAULTS_SENDS": str(rng.randint(1, 4))})
    if (process := world.space.processes.get(name)) is None:
        return
    for _ in range(100):
        if process.poll() is not None:
            tally.FAULTS["kill between Kafka's acknowledgement and the row"] += 1
            if world.while_nobody_looks is not None:
                await world.while_nobody_looks()
            break
        await asyncio.sleep(0.1)
    await world.end(name, signal.SIGKILL)


async def kill_at_an_await(world: World, rng: Random) -> None:
    """A second worker of a stage joins, and dies in the middle of its work."""
    name = world.helper(rng.choice(WORKERS))
    await world.start(name, dying={"FAULTS_AWAIT": str(rng.randint(3, 60))})
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
    """SIGSTOP for longer than the session: its partitions go to another one, and then it comes back."""
    async with world.taking(rng.choice(world.workers)) as names:
        for name in names:
            if rng.random() < 0.5:
                await world.start(world.helper(name))
            world.space.processes[name].send_signal(signal.SIGSTOP)
            await asyncio.sleep(SESSION_SECONDS + 1.5)
            world.space.processes[name].send_signal(signal.SIGCONT)
            tally.FAULTS["stop for longer than the session"] += 1


async def drain(world: World, rng: Random) -> None:
    async with world.taking(rng.choice(world.workers)) as names:
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
    async with world.restarting[name]:
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
    """SIGSTOP: its connections stay open, and nobody answers; then it goes on as if nothing had happened."""
    name = rng.choice(("postgres", "elasticsearch", "kafka"))
    async with world.restarting[name]:
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
    """Once or a few times in a row."""
    name = rng.choice(tuple(world.wires))
    for _ in range(rng.randint(1, 3)):
        world.wires[name].cut()
        tally.FAULTS[f"connections to {name} cut"] += 1
        await asyncio.sleep(rng.random() * 0.4)


async def unreachable(world: World, rng: Random) -> None:
    name = rng.choice(tuple(world.wires))
    world.wires[name].refusing = True
    world.wires[name].cut()
    tally.FAULTS[f"{name} refuses connections"] += 1
    await asyncio.sleep(0.5 + rng.random() * 2)
    world.wires[name].refusing = False


async def slow(world: World, rng: Random) -> None:
    name = rng.choice(tuple(world.wires))
    world.wires[name].delay_seconds = 0.02 + rng.random() * 0.1
    tally.FAULTS[f"{name} slow"] += 1
    await asyncio.sleep(1.5)
    world.wires[name].delay_seconds = 0.0


async def swallow(world: World, rng: Random) -> None:
    """A black hole: nothing arrives and nobody says so. What was under way arrives later, or never."""
    name = rng.choice(tuple(world.wires))
    wire = world.wires[name]
    wire.open.clear()
    tally.FAULTS[f"{name} swallows everything"] += 1
    await asyncio.sleep(1 + rng.random() * 2.5)
    if rng.random() < 0.5:
        wire.cut()
    wire.open.set()


async def one_way(world: World, rng: Random) -> None:
    """Half of a connection is lost: requests arrive and are carried out while no answer comes, or the reverse."""
    name = rng.choice(tuple(world.wires))
    wire, answers = world.wires[name], rng.random() < 2 / 3
    way = wire.answers_open if answers else wire.requests_open
    way.clear()
    tally.FAULTS[f"{name}: no {'answers' if answers else 'requests'} come through"] += 1
    await asyncio.sleep(1 + rng.random() * 4)
    wire.cut()
    way.set()


async def repair(world: World, rng: Random) -> None:
    """An operator audits and repairs in the middle of it."""
    await world.operate("audit", "--repair", "--wait-seconds", "5", "--json")


async def rebuild(world: World, rng: Random) -> None:
    """An operator makes a store anew in the middle of it; killed now and then, as by a lost terminal."""
    what = rng.choice(("keywords", "vectors"))
    kill_after_seconds = 1 + rng.random() * 4 if rng.random() < 0.5 else None
    await world.operate("rebuild", what, "--yes", "--json", kill_after_seconds=kill_after_seconds)


RECOVERY_ATTEMPTS = 20


async def recover(world: World, rng: Random) -> None:
    """An operator has the ledger catch up with Kafka, detect standing still as the command asks."""
    async with world.taking("detect") as names:
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
        recovering = asyncio.create_task(world.operate("recover", "--since", "1h", "--json"))
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
    """How far a recovery is and since when; None while Postgres is away."""
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
    world.model.faults = replace(mended(), **knob)  # type: ignore[arg-type]
    tally.FAULTS[f"embedding server: {next(iter(knob))}"] += 1
    await asyncio.sleep(1 + rng.random())
    world.model.faults = mended()


async def items_put_off(world: World, rng: Random) -> None:
    """Elasticsearch answers 429 for some items of a bulk, as a full write queue does."""
    wire = world.wires["elasticsearch"]
    wire.port = urlsplit(world.gate.url).port or 0
    wire.cut()
    for _ in range(6):
        world.gate.put_off = 3
        await asyncio.sleep(0.3)
    world.gate.put_off = 0
    tally.FAULTS["Elasticsearch: items put off (429)"] += 1
    wire.port = urlsplit(world.space.settings.elasticsearch.url).port or 9200
    wire.cut()


async def elasticsearch_full(world: World, rng: Random) -> None:
    """The block that Elasticsearch itself sets on an index when its disk passes the flood stage."""
    block = "index.blocks.read_only_allow_delete"
    await world.set_index({block: True})
    tally.FAULTS["Elasticsearch: disk full"] += 1
    try:
        await asyncio.sleep(1 + rng.random() * 1.5)
    finally:
        await world.set_index({block: None})


async def postgres_full(world: World, rng: Random) -> None:
    """Every new row fails as on a full disk: by a trigger that raises what Postgres raises then (SQLSTATE 53100). The
    servers of the tests share one disk, which must not be filled in earnest."""
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
    """Every commit of Postgres waits a tenth of a second before it is on disk: the longest that it can be told to, in
    place of a disk whose fsync is slow."""
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
    """A server that gets a tenth of the time, as one whose disk or processor is busy with something else."""
    name = rng.choice(("postgres", "elasticsearch", "kafka"))
    async with world.restarting[name]:
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
    """The clock of a worker's machine jumps while it works, and is set right some seconds later."""
    async with world.taking(rng.choice(world.workers)) as names:
        for name in names:
            ahead = rng.choice(CLOCKS.get(name, OTHER_CLOCKS))
            if name == "connectors":
                world.connectors_ahead_seconds = max(world.connectors_ahead_seconds, ahead)
            begins = 4 + rng.random() * 2
            seconds = 3 + rng.random() * 5
            await world.end(name, rng.choice((signal.SIGTERM, signal.SIGKILL)))
            await world.start(
                name,
                program=("-m", "tests.faults.other_clock"),
                more_environment={"FAULTS_CLOCK": f"{ahead},{begins},{begins + seconds}"},
            )
            tally.FAULTS[f"clock of {name} set {'forward' if ahead > 0 else 'back'}"] += 1
            await asyncio.sleep(begins + seconds)


async def next_version(world: World, rng: Random) -> None:
    """A worker of the next version takes over from one of this version, beside all others of this one; whoever starts
    it next takes it back."""
    environment = await world.next_tree.environment(world)
    if not environment:
        return  # the migration could not be applied now
    async with world.taking(rng.choice(world.workers)) as names:
        for name in names:
            await world.end(name, rng.choice((signal.SIGTERM, signal.SIGKILL)))
            await world.start(name, more_environment=environment)
            tally.FAULTS[f"{name} of the next version"] += 1
            await asyncio.sleep(2 + rng.random() * 3)


async def cut_over(world: World, rng: Random) -> None:
    """An operator takes another way of cutting into use; killed now and then while it is built."""
    tokens = 60 if await world.chunk_tokens() == 80 else 80
    kill_after_seconds = 1 + rng.random() * 4 if rng.random() < 1 / 3 else None
    build = (*BUILD, "--chunk-tokens", str(tokens))
    if await world.operate(*build, kill_after_seconds=kill_after_seconds):
        await world.operate(*CUT_OVER)


async def roll_back(world: World, rng: Random) -> None:
    """An operator goes back to the generation before, where there is one."""
    await world.operate("generation", "rollback", "--json")


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
"""Each with its weight."""


KAFKA_LOSES: dict[Fault, int] = {make_topic_anew: 5, lose_the_tail: 5}
"""What takes records along that nobody has read: only a producer that knows what it sent can publish them again."""


def choose(rng: Random, *, kafka_loses: bool) -> list[Fault]:
    """One to three; one time in twelve none. kafka_loses: whether records may be lost that nobody has read."""
    faults = FAULTS | KAFKA_LOSES if kafka_loses else FAULTS
    if rng.random() < 1 / 12:
        return []
    return rng.choices(list(faults), list(faults.values()), k=rng.randint(1, 3))

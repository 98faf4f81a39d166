"""`penstock watch` ends when it is stopped, also while a service does not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.forking import PROJECT
from tests.support.waiting import until


@pytest.mark.heavy
async def test_watch_ends_at_once_while_postgres_does_not_answer(tmp_path: Path) -> None:
    """It waited for the time limits of what it was about to do: with Kafka away as well, for up to 100 seconds."""
    connected = 0

    async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connected
        connected += 1
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never_answers, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    (tmp_path / "docs").mkdir()
    environment = {
        **os.environ,
        "PENSTOCK_HOME": str(tmp_path / "home"),
        "PENSTOCK_POSTGRES_DSN": f"postgresql://penstock@127.0.0.1:{port}/penstock?connect_timeout=100",
        "PENSTOCK_KAFKA_BOOTSTRAP": f"127.0.0.1:{port}",
    }
    arguments = (sys.executable, "-m", "cli.main", "watch", str(tmp_path / "docs"), "--acl", "staff")
    process = await asyncio.create_subprocess_exec(*arguments, cwd=PROJECT, env=environment)
    try:
        await until(lambda: connected)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        server.close()

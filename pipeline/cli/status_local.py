"""What of the local stack runs on this machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deploy.local.stack import Stack


def local(stack: Stack) -> dict[str, Any]:
    """What runs on this machine: {services, workers, query}, asked side by side. A hanging one is given two seconds."""
    with ThreadPoolExecutor(3) as asking:
        services, workers = asking.submit(stack.services), asking.submit(stack.workers)
        query = asking.submit(stack.query).result()
    return {
        "services": {
            one.name: {"url": one.url or None, "pid": one.pid, "ready": one.ready} for one in services.result()
        },
        "workers": [
            {
                "name": one.name,
                "pid": one.pid,
                "ready": one.ready,
                "waiting_for": one.waiting_for,
                "reason": one.reason,
                "stages": list(one.stages),
                "health": one.health,
            }
            for one in workers.result()
        ],
        "query": {"url": query.url or None, "pid": query.pid, "ready": query.ready},
    }

"""What of the local stack runs on this machine."""

from __future__ import annotations

from typing import Any

from deploy.local.stack import Stack


def local(stack: Stack) -> dict[str, Any]:
    """What runs on this machine: {services, workers, query}. A hanging one is given two seconds."""
    query = stack.query()
    return {
        "services": {
            one.name: {"url": one.url or None, "pid": one.pid, "ready": one.ready} for one in stack.services()
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
            for one in stack.workers()
        ],
        "query": {"url": query.url or None, "pid": query.pid, "ready": query.ready},
    }

"""The penstock command, killed when Kafka has acknowledged its N-th record (FAULTS_SENDS), before that is recorded.

Only at this moment is something published that no table knows of.
"""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import Any

from cli.main import main
from pipeline.kafka.producer import Delivery, Producer

_acknowledged = count(1)


def _on_delivery(delivery: Delivery) -> None:
    stored = not delivery.cancelled() and delivery.exception() is None
    if stored and next(_acknowledged) >= int(os.environ["FAULTS_SENDS"]):
        os.kill(os.getpid(), signal.SIGKILL)


def _install() -> None:
    send = Producer.send

    async def sending(self: Producer, *arguments: Any, **named: Any) -> Delivery:
        delivery = await send(self, *arguments, **named)
        delivery.add_done_callback(_on_delivery)
        return delivery

    Producer.send = sending  # type: ignore[method-assign]


if __name__ == "__main__":
    _install()
    main()

"""What libraries and we ourselves log while a command runs."""

from __future__ import annotations

import logging
import sys

import typer


def beside_the_answer(context: typer.Context) -> None:
    """Until the command ends: what is said beside an answer, from warnings on, never comes between the answer's lines.
    (Workers say all of it.)"""
    import structlog  # a tenth of a second: commands that ask the running service do without

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
    context.find_root().call_on_close(structlog.reset_defaults)

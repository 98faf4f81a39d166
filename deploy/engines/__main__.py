"""``python -m deploy.engines``: docker-compose.yml and deploy/Dockerfile in a real Docker engine, from nothing.

On a Debian machine, as root. Everything that it starts lives in namespaces of its own and ends with it, also on Ctrl-C.
Roots, images and the engine's store stay in a folder (``$PENSTOCK_ENGINES``, default ``engines`` in the state folder),
and are used again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deploy.engines import checks, debian, images
from deploy.engines.engine import Engine, packages, require_machine
from deploy.engines.stack import CHECKOUT, ROOT, SETTINGS, Stack, write_settings
from deploy.local.lock import exclusive
from deploy.report import Report
from deploy.version import current
from pipeline.core.errors import Misconfigured
from pipeline.runtime import settings

OVERRIDE = "override.json"
WITHOUT_MODEL = "penstock-without-model"


def folder() -> Path:
    """Where roots, images and the engine's store are kept."""
    chosen = os.environ.get("PENSTOCK_ENGINES")
    return Path(chosen).absolute() if chosen else settings.home() / "engines"


class Run:
    """One run: each step is a check of the report."""

    def __init__(self, place: Path, written: Path, report: Report, *, stand_ins: bool) -> None:
        self._place, self._written, self._report = place, written, report
        self._stand_ins = stand_ins
        self._log = place / "engine.log"
        self._log.unlink(missing_ok=True)
        self._mounts: dict[str, Path] = {CHECKOUT: ROOT, SETTINGS: written}
        self._root, self._archive = Path(), Path()
        self._services: dict[str, dict[str, Any]] = {}
        self._key = write_settings(written)

    def all(self) -> None:
        run = self._report.run
        run("Debian with Docker, and stand-ins' base", self._prepare, needed=True)
        self._with_engine(self._images, offline=False)
        self._with_engine(self._stack, offline=True)

    def _with_engine(self, steps: Any, *, offline: bool) -> None:
        """Run the steps while an engine runs; where it does not start, they are listed as not run."""
        with contextlib.ExitStack() as stack:
            engine = Engine(self._root, self._place / "docker", self._log, self._mounts, offline=offline)

            def start() -> str:
                stack.enter_context(engine)
                version = packages(self._root, "docker.io", "docker-compose")
                return ", ".join(f"{name} {number}" for name, number in version.items())

            network = "in a network of its own" if offline else "with the machine's network"
            self._report.run(f"engine {network}", start, needed=True)
            steps(engine)

    def _prepare(self) -> str:
        with ThreadPoolExecutor() as pool:
            root = pool.submit(debian.engine_root, self._place)
            archive = pool.submit(debian.base_archive, self._place)
            self._root, self._archive = root.result(), archive.result()
            self._mounts |= images.mounts(self._place)
        return f"{debian.ENGINE_SUITE}; {self._archive.stem}"

    def _images(self, engine: Engine) -> None:
        stack = Stack(engine)

        def valid() -> str:
            self._services = stack.services("*")
            return f"{len(self._services)} services"

        def third_party() -> str:
            named = images.third_party(self._services)
            first = next(iter(named))
            self._stand_ins = self._stand_ins or not images.registry_answers(engine, first)
            if self._stand_ins:
                images.build_stand_ins(engine, named.values(), self._archive)
            else:
                images.pull(engine, named)
            changed = images.override(self._services, stand_ins=self._stand_ins)
            (self._written / OVERRIDE).write_text(json.dumps(changed))
            return f"{'stand-ins, because no registry answers' if self._stand_ins else 'pulled'}: {len(named)}"

        run = self._report.run
        run("docker compose config", valid, needed=True)
        run("third-party images", third_party, needed=True)
        merged = Stack(engine, [f"{SETTINGS}/{OVERRIDE}"])
        run("image with the local model", lambda: checks.build(merged), needed=True)
        run("its size", lambda: checks.size(engine, f"penstock:{current()}", checks.LARGEST_WITH_MODEL))
        run(
            "image without it, and its size",
            lambda: checks.build_without_model(engine, WITHOUT_MODEL, stand_ins=self._stand_ins),
        )

    def _stack(self, engine: Engine) -> None:
        left_out = images.left_out(self._services, stand_ins=self._stand_ins)
        stack = Stack(engine, [f"{SETTINGS}/{OVERRIDE}"], left_out)
        checks.all(self._report, stack, self._services, self._key)


@contextlib.contextmanager
def _settings_folder(place: Path) -> Iterator[Path]:
    """For passwords of one run. Containers read files in it under users of their own."""
    with tempfile.TemporaryDirectory(prefix=".settings-", dir=place) as made:
        Path(made).chmod(0o755)
        yield Path(made)


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as one JSON document.")] = False,
    from_nothing: Annotated[bool, typer.Option(help="First remove all that earlier runs have kept.")] = False,
    stand_ins: Annotated[bool, typer.Option(help="Use stand-ins even where a registry answers.")] = False,
) -> None:
    """Run docker-compose.yml in a real Docker engine and check it. Exit code 1: a check failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    progress, place = Console(stderr=True, highlight=False), folder()
    try:
        require_machine()
        place.mkdir(parents=True, exist_ok=True)
        with exclusive(place.with_suffix(".lock"), waiting=lambda: progress.print("waiting for another run")):
            if from_nothing:
                shutil.rmtree(place)
                place.mkdir()
            debian.remove(place)
            report = Report(progress)
            with _settings_folder(place) as written:
                Run(place, written, report, stand_ins=stand_ins).all()
    except Misconfigured as error:
        progress.print(f"error: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error
    if not report.passed:
        progress.print(f"log: {place / 'engine.log'}", markup=False, soft_wrap=True)
    report.end(as_json=as_json)


if __name__ == "__main__":
    typer.run(main)

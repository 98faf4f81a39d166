"""Shows the main job on real input: ``make demo``.

Everything shown really happens: each step is a ``penstock`` command on a real stack, and each figure is read from its
answer. The input is what every machine has: the Python documentation topics and a selection of the standard library.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import psycopg
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.runtime.home import DEVELOPMENT_FILE, page_address

console = Console(highlight=False, soft_wrap=True)

PACKAGES = ("concurrent/futures", "http", "json", "tomllib", "urllib")
MODULES = ("argparse", "bisect", "contextlib", "csv", "heapq", "queue", "sched", "shelve", "tempfile")
QUESTIONS = (
    ("How do I open a context manager in an async function?", "async"),
    ("What happens when an exception is not caught in a try block?", "try"),
    ("schedule events to run at a given time", "sched"),
    ("parse command line options with sub-commands", "argparse"),
)
EDITS = 12
"""Files edited one after another while ``penstock watch`` runs, to measure source-to-searchable."""


def write_corpus(root: Path) -> int:
    """Write the input as plain files and return their number."""
    for name, text in topics.items():
        _write(root / "topics" / f"{name.replace('/', '-')}.rst", text)
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [p for package in PACKAGES for p in sorted((library / package).glob("*.py"))]
    files += [library / f"{name}.py" for name in MODULES]
    for path in files:
        if path.is_file() and path.stat().st_size:
            _write(root / "library" / path.relative_to(library), path.read_text())
    _write(
        root / "handbook" / "holidays.md",
        "# Holidays\n\nEvery penstock engineer has thirty days of paid leave a year.\n",
    )
    _write(
        root / "handbook" / "salaries.md",
        "# Salary bands\n\nThe salary band of a turbine engineer is agreed in March.\n",
    )
    return sum(1 for p in root.rglob("*") if p.is_file())


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def penstock(*arguments: str, show: str | None = None) -> Any:
    """Run a penstock command with --json, and echo it as a person would type it. Returns its output."""
    console.print(f"[bold cyan]$ penstock {show or ' '.join(arguments)}[/]")
    process = subprocess.run([_program(), *arguments, "--json"], stdout=subprocess.PIPE, check=False)
    if process.returncode:
        console.print(f"[red]`penstock {arguments[0]}` failed[/]")
        sys.exit(1)
    return json.loads(process.stdout)


def _program() -> str:
    return str(Path(sys.executable).with_name("penstock"))


def search(question: str, tag: str, top: int = 3) -> list[dict[str, Any]]:
    response = penstock("search", question, "--tag", tag, "--top", str(top), show=f'search "{question}" --tag {tag}')
    for n, hit in enumerate(response["results"], 1):
        where = "/".join(Path(hit["external_id"]).parts[-2:])
        console.print(
            f"  {n}. [green]{where}[/] ({' and '.join(hit['stores'])}): {escape(' '.join(hit['text'].split())[:80])}…"
        )
    if not response["results"]:
        console.print("  [yellow]nothing[/]")
    return list(response["results"])


def must(condition: bool, what: str) -> None:
    """End the demonstration if it does not show what it claims."""
    console.print(f"[green]✓[/] {what}\n" if condition else f"[red]✗ {what}[/]")
    if not condition:
        sys.exit(1)


@contextmanager
def watching(root: Path) -> Iterator[None]:
    console.print(f"[bold cyan]$ penstock watch {root.name}/ --acl staff &[/]")
    process = subprocess.Popen([_program(), "watch", str(root), "--acl", "staff"], stdout=subprocess.DEVNULL)
    try:
        time.sleep(3)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def freshness(dsn: str, root: Path) -> list[float]:
    """Edit files one after another. Return the seconds from each write until both stores return it."""
    paths = sorted((root / "topics").glob("*.rst"))[:EDITS]
    with psycopg.connect(dsn, autocommit=True) as connection:
        seconds = []
        for path in paths:
            path.write_text(path.read_text() + f"\nA remark was added at {time.time_ns()}.\n")
            changed = path.stat().st_mtime
            statement = (
                "SELECT extract(epoch FROM max(s.settled_at))"
                " FROM documents d JOIN index_state s ON s.document_id = d.id "
                " WHERE d.external_id = %s AND extract(epoch FROM d.source_modified_at) >= %s"
                " HAVING bool_and(s.seq >= s.want_seq)"
            )
            deadline = time.monotonic() + 60
            while not (row := connection.execute(statement, [str(path), changed - 0.001]).fetchone()):
                if time.monotonic() > deadline:
                    must(False, f"{path.name} becomes searchable")
                time.sleep(0.05)
            seconds.append(float(row[0]) - changed)
    return seconds


def main() -> None:
    home = Path(os.environ.get("PENSTOCK_HOME", ".penstock")).absolute() / "demo"
    shutil.rmtree(home / "input", ignore_errors=True)
    os.environ["PENSTOCK_HOME"] = str(home)
    root = home / "input"
    files = write_corpus(root)
    console.rule("[bold]Penstock: from a folder to hybrid search, and every change after that")
    console.print(f"{files} real files: the Python documentation topics and a part of the standard library\n")
    console.print("[bold cyan]$ penstock up[/]")
    subprocess.run([_program(), "up"], check=True)
    try:
        run(home, root)
    finally:
        console.print("[bold cyan]$ penstock down[/]")
        subprocess.run([_program(), "down"], check=True)
        shutil.rmtree(home, ignore_errors=True)


def run(home: Path, root: Path) -> None:
    start = time.monotonic()
    loaded = penstock("ingest", str(root), "--acl", "staff", "--wait", show="ingest input/ --acl staff --wait")
    took = time.monotonic() - start
    must(
        loaded["indexed"] > 100 and not loaded["dead"],
        f"{loaded['indexed']} documents, {loaded['chunks']} chunks in both stores",
    )

    hits = 0
    for question, right in QUESTIONS:
        hits += right in [Path(h["external_id"]).stem for h in search(question, "staff")]
    console.print(f"  the expected document among the first three: {hits} of {len(QUESTIONS)}\n")

    answer = penstock("ask", QUESTIONS[0][0], "--tag", "staff", show=f'ask "{QUESTIONS[0][0]}" --tag staff')
    for citation in answer["citations"][:3]:
        console.print(f"  [{citation['n']}] {escape(' '.join(citation['text'].split())[:80])}…")
    must(bool(answer["citations"]), "no model is set: the passages that an answer would cite")

    serving = penstock("status")["query"]
    page = page_address(serving["url"], home / DEVELOPMENT_FILE) if console.is_terminal else None
    must(serving["ready"], f"the same for programs and in a browser, while it runs: {page or serving['url']}")

    again = penstock("ingest", str(root), "--acl", "staff", "--wait", show="ingest input/ --acl staff --wait   # again")
    must(again["embedded"] == 0 and again["published"] == 0, "nothing changed: nothing published, embedded or written")

    longest = max((root / "library").rglob("*.py"), key=lambda p: p.stat().st_size)
    longest.write_text(longest.read_text().replace("    def ", "    # a remark\n    def ", 1))
    edited = penstock(
        "ingest", str(root), "--acl", "staff", "--wait", show=f"ingest input/ …   # one line added to {longest.name}"
    )
    must(
        1 <= edited["embedded"] <= 4,
        f"{edited['embedded']} of {longest.name}'s chunks embedded again ({edited['chunks']} in all)",
    )

    gone = root / "handbook" / "holidays.md"
    must(bool(_about(search("days of paid leave", "staff"), gone)), "holidays.md is found")
    gone.unlink()
    penstock("ingest", str(root), "--acl", "staff", "--wait", show="ingest input/ …   # holidays.md deleted")
    must(not _about(search("days of paid leave", "staff"), gone), "deleted: gone from search")

    secret = root / "handbook" / "salaries.md"
    must(bool(_about(search("salary band of an engineer", "staff"), secret)), "salaries.md is readable by staff")
    (root / "handbook" / ".penstock.toml").write_text('acl = ["board"]\n')
    revoked = penstock(
        "ingest", str(root), "--acl", "staff", "--wait", show="ingest input/ …   # handbook/ for the board only"
    )
    must(not _about(search("salary band of an engineer", "staff"), secret), "revoked: gone for staff at once")
    must(
        bool(_about(search("salary band of an engineer", "board"), secret)),
        f"and there for the board; embedded: {revoked['embedded']}",
    )

    dsn = json.loads((home / "endpoints.json").read_text())["postgres"]["dsn"]
    with watching(root):
        fresh = freshness(dsn, root)

    table = Table(title="What happened", show_header=False)
    for name, value in (
        ("documents", f"{loaded['indexed']}"),
        ("chunks", f"{loaded['chunks']}"),
        ("first load, into both stores", f"{took:.1f} s, {loaded['chunks'] / took:.0f} chunks/s"),
        (f"source to searchable, {len(fresh)} edits", f"p50 {median(fresh):.1f} s, max {max(fresh):.1f} s"),
        ("embedded again after one edited line", f"{edited['embedded']}"),
        ("embedded when nothing or only access changed", f"{again['embedded'] + revoked['embedded']}"),
    ):
        table.add_row(name, value)
    console.print(table)


def _about(hits: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    return [h for h in hits if h["external_id"] == str(path)]


if __name__ == "__main__":
    main()

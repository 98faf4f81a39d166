"""Files of SQLite in which sources keep texts."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.core.errors import Misconfigured


def open_rows(path: Path, max_bytes: int) -> sqlite3.Connection:
    """Open a file that nobody else reads, and of whose deleted rows nothing is left on disk. The caller begins and ends
    transactions, and sees to it that one thread at a time uses the connection. max_bytes: what the file may take of the
    disk of all sources; one that takes more already does not grow."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    file.execute("PRAGMA journal_mode = DELETE")  # a write-ahead log keeps old rows for as long as the file is open
    file.execute("PRAGMA secure_delete = ON")
    [page_bytes] = file.execute("PRAGMA page_size").fetchone()
    file.execute(f"PRAGMA max_page_count = {max_bytes // page_bytes}")
    return file


@contextmanager
def transaction(file: sqlite3.Connection, option: str) -> Iterator[None]:
    """A transaction that may make the file larger. Raises Misconfigured where it is full. option: says how large it may
    be."""
    try:
        file.execute("BEGIN")
        try:
            yield
            file.execute("COMMIT")
        except BaseException:
            if file.in_transaction:  # a full file has ended it
                file.execute("ROLLBACK")
            raise
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_FULL:
            raise
        raise Misconfigured(f"the rows take more than {option}, or the disk is full: raise it, or read less") from error

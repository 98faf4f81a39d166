"""Files of SQLite in which sources keep texts."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def open_rows(path: Path) -> sqlite3.Connection:
    """Open a file that nobody else reads, and of whose deleted rows nothing is left on disk. The caller begins and ends
    transactions, and sees to it that one thread at a time uses the connection."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    file.execute("PRAGMA journal_mode = DELETE")  # a write-ahead log keeps old rows for as long as the file is open
    file.execute("PRAGMA secure_delete = ON")
    return file

"""Tells to which document a file belongs: the one seen at its path before, or moved there on the same disk."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path


class Identities:
    """Stores path and external id of each file in an SQLite file. When that is lost, every document that was moved is
    published once more as a new one.

    A document's id is the path at which it was first seen. Editors that write a new file over the old one keep the
    path; ``mv`` keeps inode, size and mtime (the inode alone proves nothing: a deleted file's is given to the next new
    one). A file that is moved and edited between two scans becomes a new document. Safe to use from threads.
    """

    def __init__(self, file: Path) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, id TEXT NOT NULL UNIQUE, looks TEXT NOT NULL)"
        )
        self._db.execute("CREATE INDEX IF NOT EXISTS files_looks ON files (looks)")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def of(self, path: str, stat: os.stat_result) -> str:
        """Return the id of the file that is at ``path`` now."""
        looks = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        with self._lock:
            row = self._db.execute("SELECT id, looks FROM files WHERE path = ?", [path]).fetchone()
            if row is not None:
                if row[1] != looks:
                    self._db.execute("UPDATE files SET looks = ? WHERE path = ?", [looks, path])
                return str(row[0])
            for old, id_ in self._db.execute("SELECT path, id FROM files WHERE looks = ?", [looks]).fetchall():
                if not os.path.lexists(old):
                    self._db.execute("UPDATE files SET path = ? WHERE path = ?", [path, old])
                    return str(id_)
            id_ = path
            while self._db.execute("SELECT 1 FROM files WHERE id = ?", [id_]).fetchone():
                id_ += "#"  # what was first seen here has moved away, and keeps its name
            self._db.execute("INSERT INTO files VALUES (?, ?, ?)", [path, id_, looks])
            return id_

    def path_of(self, id_: str) -> str:
        """Return where the document was seen last; an unknown id is a path."""
        with self._lock:
            row = self._db.execute("SELECT path FROM files WHERE id = ?", [id_]).fetchone()
        return str(row[0]) if row else id_

    def paths(self) -> list[str]:
        """Return where the documents were seen last."""
        with self._lock:
            return [str(path) for (path,) in self._db.execute("SELECT path FROM files")]

    def id_at(self, path: str) -> str | None:
        """Return the id of the document that was last seen there."""
        with self._lock:
            row = self._db.execute("SELECT id FROM files WHERE path = ?", [path]).fetchone()
        return str(row[0]) if row else None

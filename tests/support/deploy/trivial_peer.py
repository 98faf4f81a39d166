"""A peer that the runner of bench.peers is tried on: a chunk is a paragraph, each embedded once by its text.

Variants: "" does everything well; "hoarder" never removes a row; "broken" ends before it greets.
"""

from __future__ import annotations

import json
from urllib.request import Request, urlopen

import psycopg

from bench.peers.protocol import DIMENSIONS, Driver, Rows, Task, read_task, serve

TABLE = f"CREATE TABLE chunks (name text, text text, access text, embedding vector({DIMENSIONS}))"


def main() -> None:
    task = read_task()
    if task.variant == "broken":
        raise SystemExit("nothing works here")
    with psycopg.connect(task.dsn, autocommit=True) as connection:
        connection.execute(TABLE)
    rows = Rows("chunks", "name", "text", "access")
    serve(Driver(rows, lambda: sync(task), ("psycopg",), repair=lambda: sync(task)))


def sync(task: Task) -> None:
    expected = [(d.name, text, d.access) for d in task.documents() for text in d.text.split("\n\n")]
    with psycopg.connect(task.dsn) as connection:
        there = set(connection.execute("SELECT name, text, access FROM chunks").fetchall())
        vectors = dict(connection.execute("SELECT DISTINCT ON (text) text, embedding::text FROM chunks").fetchall())
        new = list({text: None for _, text, _ in expected if text not in vectors})
        if new:
            vectors |= dict(zip(new, embed(task, new), strict=True))
        if task.variant != "hoarder":
            for row in there - set(expected):
                connection.execute("DELETE FROM chunks WHERE (name, text, access) = (%s, %s, %s)", row)
        for row in dict.fromkeys(row for row in expected if row not in there):
            connection.execute("INSERT INTO chunks VALUES (%s, %s, %s, %s)", (*row, vectors[row[1]]))


def embed(task: Task, texts: list[str]) -> list[str]:
    body = json.dumps({"input": texts, "model": "any"}).encode()
    request = Request(f"{task.embedding}/embeddings", body, {"content-type": "application/json"})
    with urlopen(request) as answer:
        return [json.dumps(row["embedding"]) for row in json.load(answer)["data"]]


if __name__ == "__main__":
    main()

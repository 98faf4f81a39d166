"""Hostile batches are read without an error and without much memory."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any, NamedTuple

import cramjam
import pytest
from aiokafka import TopicPartition
from aiokafka.consumer import fetcher
from aiokafka.consumer.fetcher import PartitionRecords

import pipeline.kafka  # installs the reader of batches
from pipeline.kafka.batches import MAX_BATCH_BYTES, size_of
from tests.support.pipeline.hostile_batches import PACK, batch, record


class Consumed(NamedTuple):
    """A record as a consumer has it."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


BOMB = b"\0" * (4 * MAX_BATCH_BYTES)


def consumed(*stored: bytes) -> list[tuple[int, bytes | None]]:
    """Offsets and values, as every consumer of this process gets them."""
    assert pipeline.kafka
    joined, base = bytearray(), 0
    for batch_bytes in stored:
        placed = bytearray(batch_bytes)
        placed[:8] = base.to_bytes(8, "big")
        base += int.from_bytes(placed[23:27], "big") + 1
        joined += placed
    records: Any = PartitionRecords(
        TopicPartition("t", 0), fetcher.MemoryRecords(bytes(joined)), [], 0, None, None, True, 0
    )
    return [(consumer_record.offset, consumer_record.value) for consumer_record in records]


GOOD = batch(record(0, b"good"))


@pytest.mark.parametrize("codec", PACK)
def test_batches_of_every_codec_are_read(codec: str) -> None:
    texts = [b"a text " * 10_000, b"", b"another"]
    stored = batch(*(record(number, text) for number, text in enumerate(texts)), codec=codec)
    assert consumed(stored, GOOD) == [*enumerate(texts), (3, b"good")]


@pytest.mark.parametrize("codec", PACK)
def test_a_header_name_that_is_not_utf8_does_not_hide_the_records_before_and_behind_it(codec: str) -> None:
    hostile = batch(record(0, b"before"), record(1, b"x", header=b"\xff\xfe"), record(2, b"y"), codec=codec)
    assert consumed(GOOD, hostile, GOOD) == [(0, b"good"), (1, b"before"), (3, None), (4, b"good")]


@pytest.mark.heavy
@pytest.mark.parametrize("codec", [name for name in PACK if name != "plain"])
def test_a_batch_that_unpacks_to_very_much_takes_little_memory(codec: str) -> None:
    stored = batch(record(0, BOMB), codec=codec)
    tracemalloc.start()
    try:
        assert consumed(stored, GOOD) == [(0, None), (1, b"good")]
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_BATCH_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", [name for name in PACK if name != "plain"])
def test_what_a_codec_cannot_unpack_does_not_hide_the_next_batch(codec: str) -> None:
    whole = bytes(PACK[codec][1](record(0, b"a text " * 1000)))
    for packed in (b"\x01\x02\x03", whole[: len(whole) // 2], b"\0" * 100):
        assert consumed(batch(record(0, b""), codec=codec, packed=packed), GOOD) == [(0, None), (1, b"good")]


@pytest.mark.parametrize(
    "codec", [name for name in PACK if name not in ("plain", "snappy")]
)  # that packs to a twentieth
def test_a_small_batch_of_very_many_records_that_are_alike_is_refused(codec: str) -> None:
    """Each of them would become a dead letter: millions of a batch that is one kilobyte long."""
    alike = batch(*(record(0, b"") for _ in range(20_000)), codec=codec)
    assert len(alike) < 20_000
    assert consumed(alike, GOOD) == [(19_999, None), (20_000, b"good")]


@pytest.mark.parametrize("codec", ["plain", "zstd"])
def test_a_record_of_very_many_headers_takes_little_memory(codec: str) -> None:
    """Two bytes make a header, which took 64 in memory: one record took the worker a gigabyte."""
    stored = batch(record(0, b"x", header=b"", headers=2_000_000, of=b""), codec=codec)
    tracemalloc.start()
    try:
        assert consumed(stored, GOOD) == [(0, None), (1, b"good")]
        assert tracemalloc.get_traced_memory()[1] < MAX_BATCH_BYTES
    finally:
        tracemalloc.stop()
    few = batch(record(0, b"x" * 2**21, header=b"a", headers=1_000), codec=codec)
    assert [offset for offset, _ in consumed(few)] == [0]
    assert consumed(few)[0][1] is not None


def test_a_batch_of_very_many_records_is_refused() -> None:
    assert consumed(batch(*[record(0, b"")] * 100_001), GOOD) == [(100_000, None), (100_001, b"good")]


def test_headers_and_objects_count_towards_the_memory_of_a_record() -> None:
    """Only keys and values did: a worker took records with 25 MB of headers, packed to a kilobyte, without a limit."""
    assert size_of(Consumed(b"k", b"v", (("name", b"x" * 10**6), ("other", None)))) > 10**6
    assert size_of(Consumed(None, b"", ())) >= 1_000


@pytest.mark.parametrize("codec", PACK)
def test_a_large_batch_of_the_smallest_signed_records_is_read(codec: str) -> None:
    stored = batch(*(record(number, random.Random(number).randbytes(64)) for number in range(5_000)), codec=codec)
    assert [offset for offset, _ in consumed(stored)] == list(range(5_000))


def test_a_file_of_gzip_with_very_many_members_is_refused_at_the_first() -> None:
    packed = PACK["gzip"][1](b"") * 100_000
    assert consumed(batch(record(0, b""), codec="gzip", packed=packed), GOOD) == [(0, None), (1, b"good")]


def test_very_many_empty_blocks_of_snappy_are_refused() -> None:
    begin = PACK["snappy"][1](b"x")[:16]
    block = bytes(cramjam.snappy.compress_raw(b""))
    packed = begin + (len(block).to_bytes(4, "big") + block) * 100_000
    assert consumed(batch(record(0, b""), codec="snappy", packed=packed), GOOD) == [(0, None), (1, b"good")]


def test_records_whose_lengths_are_wrong_do_not_hide_the_next_batch() -> None:
    endless = b"\xfe" + b"\xff" * 8 + b"\x01"  # 2**63 - 1, which Kafka refuses and its imitations may not
    wrong = b"\0\0\0" + endless + b"k", b"\0\0\0\x02k\x02v\x02\x02h" + endless + b"x"
    lengths = [bytes([2 * len(body)]) + body for body in wrong]
    for garbage in (b"", b"\xff" * 20, record(0, b"x")[:-1], record(0, b"x") + b"more", b"\x01\0\0\0", *lengths):
        read = consumed(batch(garbage), GOOD)
        assert read[-1] == (1, b"good"), garbage
        assert len(read) == 2

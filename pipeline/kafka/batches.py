"""Batches of records as Kafka stores them, read so that no batch stops its consumer.

Kafka stores what a producer sends without examining the names of headers, or how large a batch becomes when it is
unpacked. aiokafka unpacks a whole batch into memory, and raises an error for a header's name that is not UTF-8. Either
way the consumer reads the same batch again, for ever, and everything behind it waits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import cramjam
import structlog
from aiokafka.codec import _detect_xerial_stream
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.memory_records import MemoryRecords

from topics.registry import MAX_MESSAGE_BYTES

log = structlog.get_logger()

MAX_BATCH_BYTES = MAX_MESSAGE_BYTES + 2**20
"""The most that a batch may take when it is unpacked: the largest record, and room for its batch."""
MAX_TINY_RECORDS, MIN_PACKED_BYTES = 1_000, 2
"""A batch of more records has at least so many packed bytes for each. Ids and versions do not pack better, and a
signature takes 64; records that are all alike would be 3.5 million in a batch of one kilobyte, each a dead letter."""
MAX_BATCH_RECORDS = 100_000
MAX_HEADERS = 1_000
"""The most headers of a record in a batch of more than LARGE_BYTES. Two bytes make a header that takes 64."""
HEADER_BYTES = 61
COUNT = slice(57, 61)
ATTRIBUTES = slice(21, 23)
CODEC_BITS = 0x07
MAX_SNAPPY_BLOCKS = MAX_BATCH_BYTES // 1024
"""Producers make blocks of 32 KiB. Each takes time, also one that holds nothing."""
LARGE_BYTES = 2**20
"""The size from which a record that is read alone is fetched again rather than kept unpacked with its batch."""
RECORD_OBJECT_BYTES, HEADER_OBJECT_BYTES = 1_024, 128
"""The memory that a record and a header take beyond their names and values."""
POLL_BYTES = 16 * 2**20
"""The size at which a poll takes no further record."""
_FIRST_GUESS = 8
"""Buffers for unpacking begin at so many times the packed size, and grow by the same factor: texts rarely need a second
one."""


class TooLarge(ValueError):
    """A batch takes more than MAX_BATCH_BYTES when it is unpacked, or has very many records that are alike."""


UNREADABLE = (
    TooLarge,
    CorruptRecordException,
    KeyError,  # there is no such codec
    ValueError,  # also a name that is not UTF-8
    IndexError,
    OverflowError,  # a length that no memory has
    SystemError,
    EOFError,
    zlib.error,
    cramjam.DecompressionError,
)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for the records of a batch that cannot be read, at the offset of the last of them. Like every record
    without a value, it becomes a dead letter that names its place."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: None = None
    value: None = None
    checksum: None = None
    headers: tuple[tuple[str, bytes], ...] = ()


class Batch:
    """A batch with the attributes that aiokafka's fetcher uses, whose iteration neither fails nor takes more memory
    than MAX_BATCH_BYTES and its records."""

    def __init__(self, batch: Any, stored: memoryview) -> None:
        """batch: aiokafka's. stored: its bytes."""
        self._batch = batch
        self._stored = stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        batch, offset = self._batch, -1
        try:
            if batch.compression_type:
                whole = unpacked(self._stored, batch.compression_type)
                require_small(memoryview(whole))
                batch = DefaultRecordBatch(whole)
            else:
                require_small(self._stored)
            for record in batch:
                offset = record.offset
                yield record
        except UNREADABLE as error:
            last = self._batch.next_offset - 1
            first = max(offset + 1, self._batch.base_offset)
            log.warning("kafka_batch_unreadable", first=first, last=last, error=type(error).__name__)
            if offset < last:
                yield Unreadable(last, self._batch.max_timestamp, self._batch.timestamp_type)


class Batches:
    """The batches of one partition in a response of Kafka, instead of aiokafka's ``MemoryRecords``."""

    def __init__(self, stored: bytes) -> None:
        self._batches = MemoryRecords(stored)
        self._rest = memoryview(stored)
        self.size_in_bytes = self._batches.size_in_bytes
        self.has_next = self._batches.has_next

    def next_batch(self) -> Any:
        batch = self._batches.next_batch()
        size = 12 + int.from_bytes(self._rest[8:12], "big")
        stored, self._rest = self._rest[:size], self._rest[size:]
        return Batch(batch, stored) if isinstance(batch, DefaultRecordBatch) else batch


def unpacked(stored: memoryview, codec: int) -> bytes:
    """Return a compressed batch as it would be without compression, except for its checksum. Raises TooLarge, or an
    error of the codec."""
    count, packed = int.from_bytes(stored[COUNT], "big"), len(stored) - HEADER_BYTES
    if count > MAX_TINY_RECORDS and packed < MIN_PACKED_BYTES * count:
        raise TooLarge
    attributes = int.from_bytes(stored[ATTRIBUTES], "big") & ~CODEC_BITS
    header = bytearray(stored[:HEADER_BYTES])
    header[ATTRIBUTES] = attributes.to_bytes(2, "big")
    return bytes(header) + _UNPACK[codec](stored[HEADER_BYTES:])


def require_small(stored: memoryview) -> None:
    """Raise TooLarge if the records of a batch that is not compressed would take far more memory than their bytes."""
    count = int.from_bytes(stored[COUNT], "big")
    if count > MAX_BATCH_RECORDS:
        raise TooLarge
    if len(stored) <= LARGE_BYTES:
        return
    at = HEADER_BYTES
    for _ in range(count):
        length, at = _varint(stored, at)
        end, at = at + length, at + 1  # the attributes
        for _ in range(2):  # the differences of time and offset
            _, at = _varint(stored, at)
        for _ in range(2):  # key and value
            length, at = _varint(stored, at)
            at += max(length, 0)
        headers, _ = _varint(stored, at)
        if headers > MAX_HEADERS:
            raise TooLarge
        at = end


def _varint(stored: memoryview, at: int) -> tuple[int, int]:
    """Return a number of variable length, and the place after it. Raises IndexError at the end."""
    number, shift = 0, 0
    while True:
        byte = stored[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
        if shift > 63:
            raise CorruptRecordException


def _decoded(codec: Any, packed: memoryview) -> bytes:
    size = min(_FIRST_GUESS * len(packed) + 1024, MAX_BATCH_BYTES)
    while True:
        buffer = bytearray(size)
        try:
            return bytes(memoryview(buffer)[: codec.decompress_into(bytes(packed), buffer)])
        except cramjam.DecompressionError as error:
            if "whole buffer" not in str(error):
                raise
            if size == MAX_BATCH_BYTES:
                raise TooLarge from error
            size = min(_FIRST_GUESS * size, MAX_BATCH_BYTES)


def _gunzipped(packed: memoryview) -> bytes:
    member = zlib.decompressobj(16 + zlib.MAX_WBITS)
    records = member.decompress(packed, MAX_BATCH_BYTES + 1)
    if len(records) > MAX_BATCH_BYTES:
        raise TooLarge
    if not member.eof or member.unused_data:  # producers make one member
        raise CorruptRecordException
    return records


def _unsnapped(packed: memoryview) -> bytes:
    blocks = []
    if _detect_xerial_stream(packed):
        at = 16
        while at < len(packed):
            size = int.from_bytes(packed[at : at + 4], "big")
            blocks.append(bytes(packed[at + 4 : at + 4 + size]))
            at += 4 + size
            if len(blocks) > MAX_SNAPPY_BLOCKS:
                raise TooLarge
    else:
        blocks.append(bytes(packed))
    if sum(cramjam.snappy.decompress_raw_len(block) for block in blocks) > MAX_BATCH_BYTES:
        raise TooLarge
    return b"".join(bytes(cramjam.snappy.decompress_raw(block)) for block in blocks)


_UNPACK: Mapping[int, Callable[[memoryview], bytes]] = {
    1: _gunzipped,
    2: _unsnapped,
    3: partial(_decoded, cramjam.lz4),
    4: partial(_decoded, cramjam.zstd),
}
"""By codec, as Kafka numbers them."""


_room: ContextVar[int | None] = ContextVar("room_of_poll", default=None)
"""How many bytes of records the poll of this task may still take; None: any number."""


def begin_poll(room: int) -> None:
    """Let the polls of this task take records of about ``room`` bytes until the next call: the last record may be
    larger."""
    _room.set(room)


class Fetched(fetcher.FetchResult):  # type: ignore[misc]  # aiokafka has no types
    """The records of one partition in a response, of which a poll takes no more than it has room for."""

    _partition_records: Any

    def check_assignment(self, tp: Any) -> bool:
        if (reading := self._partition_records) is None:
            return False
        if super().check_assignment(tp):
            return True
        _release(reading)
        return False

    def getone(self) -> Any:
        reading = self._partition_records
        record = super().getone()
        if record is not None and size_of(record) > LARGE_BYTES:
            _release(reading)
            self._partition_records = None
        return record

    def getall(self, max_records: int | None = None) -> list[Any]:
        if (room := _room.get()) is None:
            taken: list[Any] = super().getall(max_records)
            return taken
        records: list[Any] = []
        if not self.check_assignment(self._topic_partition) or not self.has_more():
            return records
        if room <= 0:
            return records
        unpacked_records: Any = self._partition_records
        while len(records) != max_records and room > 0:
            record = next(unpacked_records, None)
            if record is None:
                break
            records.append(record)
            room -= size_of(record)
        _room.set(room)
        self._update_position()
        if len(records) != max_records:  # at the end, or without room: what is unpacked is fetched again
            _release(unpacked_records)
            self._partition_records = None
        return records


def _release(records: Any) -> None:
    """Drop what is unpacked. The records and the generator that reads them hold each other, and Python looks for such
    circles after many objects, not after many bytes."""
    if (reading := records._records_iterator) is not None:
        reading.close()


def size_of(record: Any) -> int:
    """The bytes that a record takes in memory, roughly."""
    headers = sum(len(name) + len(value or b"") + HEADER_OBJECT_BYTES for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers + RECORD_OBJECT_BYTES


def install() -> None:
    """Let all of aiokafka's consumers in this process, faust's too, read batches in this way. Repeats are harmless."""
    fetcher.MemoryRecords = Batches
    fetcher.FetchResult = Fetched

"""Batches that Kafka stores and no client of ours makes, byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import cramjam
from aiokafka import AIOKafkaProducer
from aiokafka.codec import gzip_encode, snappy_encode
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c, encode_varint

PACK: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "plain": (0, bytes),
    "gzip": (1, gzip_encode),
    "snappy": (2, snappy_encode),
    "snappy without blocks": (2, lambda records: bytes(snappy_encode(records, xerial_compatible=False))),
    "lz4": (3, lambda records: bytes(cramjam.lz4.compress(records))),
    "zstd": (4, lambda records: bytes(cramjam.zstd.compress(records))),
}
"""By name: Kafka's number of a codec, and the function."""


def _field(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(number: int) -> bytes:
    written = bytearray()
    encode_varint(number, written.append)
    return bytes(written)


def record(number: int, value: bytes, *, header: bytes | None = None, headers: int = 1, of: bytes = b"v") -> bytes:
    """A record with the key ``k``. number: its place in the batch. header: the name of a header, which it has so many
    times, with the value ``of``."""
    written = _varint(0) if header is None else _varint(headers) + (_field(header) + _field(of)) * headers
    body = b"\0" + _varint(0) + _varint(number) + _field(b"k") + _field(value) + written
    return _field(body)


def batch(*records: bytes, codec: str = "plain", packed: bytes | None = None) -> bytes:
    """A batch of these records. packed: instead of what the codec makes of them."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, 0, 10_000_000)
    for number in range(len(records)):
        builder.append(number, timestamp=None, key=b"k", value=b"v", headers=[])
    number, pack = PACK[codec]
    stored = bytearray(builder.build()[:61]) + (packed or pack(b"".join(records)))
    stored[8:12] = (len(stored) - 12).to_bytes(4, "big")
    stored[21:23] = number.to_bytes(2, "big")
    stored[17:21] = calc_crc32c(memoryview(stored)[21:]).to_bytes(4, "big")
    return bytes(stored)


def bomb(value_bytes: int) -> bytes:
    """A batch in zstd with one record, whose value is so many zeros."""
    whole = record(0, b"")
    begin = b"\0" + _varint(0) + _varint(0) + _field(b"k") + _varint(value_bytes)
    pack = cramjam.zstd.Compressor()
    pack.compress(_varint(len(begin) + value_bytes + 1) + begin)
    zeros = b"\0" * 2**20
    for at in range(0, value_bytes, len(zeros)):
        pack.compress(zeros[: value_bytes - at])
    pack.compress(_varint(0))
    return batch(whole, codec="zstd", packed=bytes(pack.finish()))


async def send(kafka: AIOKafkaProducer, topic: str, partition: int, stored: bytes) -> None:
    """Send a batch as it is."""
    builder = kafka.create_batch()
    builder.append(timestamp=None, key=b"k", value=b"v")
    builder.close()
    builder._buffer = bytearray(stored)
    await (await kafka.send_batch(builder, topic, partition=partition))

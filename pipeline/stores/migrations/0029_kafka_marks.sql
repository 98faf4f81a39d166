-- What each consumer group last handled of each partition, written before the offset is committed in Kafka. With it a
-- worker notices that a topic was made anew, lost its tail or grew again past the committed offset, and reads again what
-- came after the newest record that is still the same (docs/adr/0036-kafka-log-moved.md).
CREATE TABLE kafka_marks (
    consumer_group text     NOT NULL,
    topic          text     NOT NULL,
    partition      integer  NOT NULL,
    log_id         text     NOT NULL,          -- of the cluster and the topic: a topic made anew has another one
    offsets        bigint[] NOT NULL,          -- of some handled records, ascending, the last one handled last;
    sent_ms        bigint[] NOT NULL,          -- their timestamps, in milliseconds since 1970;
    digests        bigint[] NOT NULL,          -- and the digests of their timestamps, keys and values
    marked_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer_group, topic, partition),
    CHECK (cardinality(offsets) = cardinality(sent_ms) AND cardinality(sent_ms) = cardinality(digests))
);
-- A row is written about once a second while its partition is read: in place, without index entries.
ALTER TABLE kafka_marks SET (fillfactor = 50);

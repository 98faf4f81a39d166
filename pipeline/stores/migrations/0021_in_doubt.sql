-- Intent before publishing: a row is in doubt from before its event is handed to Kafka until its acknowledgement is recorded.

ALTER TABLE connector_items
    ADD COLUMN in_doubt_since timestamptz; -- newest observed_at that may have been sent; NULL: the row says what was published
CREATE INDEX connector_items_in_doubt ON connector_items (tenant, source) WHERE in_doubt_since IS NOT NULL;

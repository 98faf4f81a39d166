-- A sweep writes nothing for a document that is as it was (docs/adr/0044-sweeps-write-what-changes.md). From here on
-- connector_items.swept_at says when the row was last written after a look at the source; the version before this one
-- still writes it for every document that its sweeps list, and its deletions go by its own sweep's times alone.

ALTER TABLE connector_items
    ADD COLUMN unlisted_since timestamptz; -- when the sweep began that lacked it and may not delete it; NULL: none

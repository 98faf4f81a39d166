-- The version of a published content, so that a token can name what is not in both stores yet (docs/consistency.md,
-- docs/adr/0090-tokens-of-connectors.md).
ALTER TABLE connector_publications ADD COLUMN version bigint; -- of content; NULL: recorded before there was this column

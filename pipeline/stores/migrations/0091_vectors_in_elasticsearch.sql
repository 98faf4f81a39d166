-- Where the nearest vectors of a generation are searched: in the graph over its chunk table, or in its keyword index.
ALTER TABLE generations ADD COLUMN vectors text NOT NULL DEFAULT 'pgvector' CHECK (vectors IN ('pgvector', 'elasticsearch'));

-- Every process makes a generation's own model from its row; what a build has cost and whether it may be cut over to;
-- and which generation a rollback goes back to.
ALTER TABLE generations
    ADD COLUMN service jsonb,                              -- where the model is; never its key. NULL: the settings say it
    ADD COLUMN since   timestamptz NOT NULL DEFAULT now(); -- in its present state
CREATE UNIQUE INDEX one_previous_generation ON generations (state) WHERE state = 'previous';

ALTER TABLE builds
    ADD COLUMN tokens   bigint NOT NULL DEFAULT 0,         -- that its model has read
    ADD COLUMN ready_at timestamptz;                       -- when both stores and the graph were complete

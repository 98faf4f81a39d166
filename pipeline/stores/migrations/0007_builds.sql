-- How far the making of a generation has come: `penstock rebuild` and `penstock generation build` go on from here.
CREATE TABLE builds (
    generation text PRIMARY KEY REFERENCES generations,
    origin     text NOT NULL REFERENCES generations,  -- the active one that it is to replace
    replaces   text[] NOT NULL,                       -- stores that are made anew; the others it shares with origin
    position   uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',  -- documents up to this id are in
    filled     bigint NOT NULL DEFAULT 0,             -- so many
    filled_at  timestamptz,                           -- when the last of them was
    created_at timestamptz NOT NULL DEFAULT now()
);

-- When the last rows of a retired generation were removed.
ALTER TABLE generations ADD COLUMN cleared_at timestamptz;

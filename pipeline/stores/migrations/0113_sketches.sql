-- Whether the rows of a generation's chunk table have sketches (docs/adr/0121). Tables that exist have none: they get
-- them with a new generation, or with `penstock rebuild vectors`.
ALTER TABLE generations ADD COLUMN sketched boolean NOT NULL DEFAULT false;

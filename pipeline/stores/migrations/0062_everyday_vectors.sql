-- The vectors of the everyday questions by a generation's model (pipeline/generations/calibration.py).
ALTER TABLE generations ADD COLUMN everyday bytea;  -- NULL: not embedded yet

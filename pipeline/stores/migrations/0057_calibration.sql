-- The floor of relevance of a generation, measured on its own vectors (pipeline/core/relevance.py).
ALTER TABLE generations ADD COLUMN calibration jsonb;  -- NULL: not measured yet

-- To have several processes, the planner read a large table whole, for a caller who may read little of it.
ALTER FUNCTION readers.nearest(halfvec, text, text[], integer) SET max_parallel_workers_per_gather = 0;

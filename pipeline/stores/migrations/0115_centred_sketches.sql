-- Sketches of vectors without the mean of their model (docs/adr/0123). centred: whether the chunk table's sketches are such;
-- then sketched is false, so that workers of an older version, which know no centre, make none. centre: recorded by the
-- first worker with the model, before the first row.
ALTER TABLE generations
    ADD COLUMN centred boolean NOT NULL DEFAULT false,
    ADD COLUMN centre vector;
ALTER TABLE generations ADD CONSTRAINT one_kind_of_sketches CHECK (NOT (sketched AND centred) AND (centred OR centre IS NULL));

DO $$
DECLARE
    definition text := pg_get_functiondef('readers.nearest(halfvec, text, text[], integer)'::regprocedure);
    change     text[];
BEGIN
    FOREACH change SLICE 1 IN ARRAY ARRAY[
        ['(active.quantisation = ''binary'' AND NOT active.sketched)',
         '(active.quantisation = ''binary'' AND NOT (active.sketched OR active.centred))'],
        ['IF walk AND active.quantisation = ''binary'' AND active.sketched THEN',
         'IF walk AND active.quantisation = ''binary'' AND (active.sketched OR active.centred) THEN'],
        ['SELECT sketch_of(query::real[], a.atttypmod)', $new$SELECT sketch_of((CASE
                WHEN active.centred THEN l2_normalize(query::vector) - active.centre ELSE query::vector
            END)::real[], a.atttypmod)$new$]
    ] LOOP
        IF position(change[1] IN definition) = 0 THEN
            RAISE EXCEPTION 'readers.nearest has no %', change[1];
        END IF;
        definition := replace(definition, change[1], change[2]);
    END LOOP;
    EXECUTE definition;
END $$;

-- What SQL needs to make a sketch as pipeline/core/sketch.py does, for `readers.nearest` (docs/adr/0122). Written with the
-- chunk table of a generation whose graph holds sketches, from the same code; the same for ever.
CREATE TABLE sketch_rotations (
    bits   integer PRIMARY KEY,
    signs  real[] NOT NULL,    -- of each round, one after the other
    orders integer[] NOT NULL, -- likewise: which value comes to each place, from 1 on
    mixers vector[] NOT NULL   -- the rows of the matrix by which each block is multiplied
);

CREATE FUNCTION sketch_of(vector real[], bits integer) RETURNS varbit
LANGUAGE plpgsql STABLE STRICT SET search_path = public, pg_temp AS $$
DECLARE
    rotation sketch_rotations;
    block    integer;
    places   real[] := vector || array_fill(0::real, ARRAY[sketch_of.bits - cardinality(vector)]);
BEGIN
    SELECT r.* INTO rotation FROM sketch_rotations r WHERE r.bits = sketch_of.bits;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    block := cardinality(rotation.mixers);
    FOR done IN 0 .. cardinality(rotation.orders) - 1 BY sketch_of.bits LOOP
        SELECT array_agg(product ORDER BY n) INTO places
        FROM (
            SELECT b.n * block + m.n AS n, -(b.of <#> m.of) AS product
            FROM (
                SELECT (p.n - 1) / block AS n, array_agg(places[p.place] * p.sign ORDER BY p.n)::vector AS of
                FROM unnest(
                    rotation.orders[done + 1 : done + sketch_of.bits], rotation.signs[done + 1 : done + sketch_of.bits]
                ) WITH ORDINALITY p (place, sign, n)
                GROUP BY 1
            ) b CROSS JOIN unnest(rotation.mixers) WITH ORDINALITY m (of, n)
            OFFSET 0
        ) products;
    END LOOP;
    RETURN (SELECT string_agg(CASE WHEN place > 0 THEN '1' ELSE '0' END, '' ORDER BY n)::varbit
            FROM unnest(places) WITH ORDINALITY p (place, n));
END $$;
REVOKE EXECUTE ON FUNCTION sketch_of FROM PUBLIC;

-- Other services search a graph of sketches as ours does. A row without a sketch, which a worker of an older version wrote,
-- waits outside of it; and an index over an expression, as such a worker builds it, is no graph for it.
DO $$
DECLARE
    definition text := pg_get_functiondef('readers.nearest(halfvec, text, text[], integer)'::regprocedure);
    change     text[];
BEGIN
    FOREACH change SLICE 1 IN ARRAY ARRAY[
        [E'DECLARE\n', E'DECLARE\n    sketch    varbit;\n    waiting   text := ''NOT c.in_graph'';\n'],
        ['a.amname = ''hnsw'' AND i.indisvalid;', $new$a.amname = 'hnsw' AND i.indisvalid
      AND (i.indkey[0] = 0) = (active.quantisation = 'binary' AND NOT active.sketched);$new$],
        ['walk := walk AND partial IS NOT NULL;', $new$walk := walk AND partial IS NOT NULL;
    IF walk AND active.quantisation = 'binary' AND active.sketched THEN
        SELECT sketch_of(query::real[], a.atttypmod) INTO sketch FROM pg_attribute a
        WHERE a.attrelid = to_regclass(format('%I', active.chunk_table)) AND a.attname = 'sketch';
        walk := sketch IS NOT NULL;
        near := format('c.sketch <~> $5::bit(%s)', length(sketch));
        waiting := '(NOT c.in_graph OR c.sketch IS NULL)';
    END IF;$new$],
        ['WHERE c.in_graph AND c.access_id', 'WHERE NOT (%4$s) AND c.in_graph AND c.access_id'],
        ['WHERE NOT c.in_graph AND c.access_id', 'WHERE %4$s AND c.access_id'],
        [E'active.vector_type, active.chunk_table, near\n', E'active.vector_type, active.chunk_table, near, waiting\n'],
        ['USING query, readable, wanted, rescored * wanted;', 'USING query, readable, wanted, rescored * wanted, sketch;']
    ] LOOP
        IF position(change[1] IN definition) = 0 THEN
            RAISE EXCEPTION 'readers.nearest has no %', change[1];
        END IF;
        definition := replace(definition, change[1], change[2]);
    END LOOP;
    EXECUTE definition;
END $$;

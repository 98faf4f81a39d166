-- What a graph in pgvector holds of each vector: its numbers, or only their signs (docs/adr/0106).
ALTER TABLE generations ADD COLUMN quantisation text NOT NULL DEFAULT 'halfvec' CHECK (quantisation IN ('halfvec', 'binary'));

-- Other services search a graph of signs as ours does: four times as many rows are walked, and compared by their whole
-- vectors (query/retrieval/vectors.py).
DO $$
DECLARE
    definition text := pg_get_functiondef('readers.nearest(halfvec, text, text[], integer)'::regprocedure);
BEGIN
    definition := replace(definition, E'DECLARE\n', E'DECLARE\n    rescored  integer := 1;\n    near      text;\n');
    definition := replace(definition, 'SELECT array_agg(DISTINCT a.id) INTO readable', $new$
    IF active.quantisation = 'binary' THEN
        rescored := 4;
        near := format('binary_quantize(c.embedding)::bit(%s) <~> binary_quantize($1::%s)::bit(%1$s)',
            active.dimensions, active.vector_type);
    ELSE
        near := format('c.embedding <=> $1::%s', active.vector_type);
    END IF;
    SELECT array_agg(DISTINCT a.id) INTO readable$new$);
    definition := replace(definition, '* wanted *', '* wanted * rescored *');
    definition := replace(definition,
        $old$WHERE c.in_graph AND c.access_id = ANY ($2) ORDER BY c.embedding <=> $1::%1$s LIMIT $3)$old$,
        $new$WHERE c.in_graph AND c.access_id = ANY ($2) ORDER BY %3$s LIMIT $4)$new$);
    definition := replace(definition,
        E' both_ ORDER BY distance LIMIT $3) n\',\n            active.vector_type, active.chunk_table\n        ) INTO offered, distances USING query, readable, wanted;',
        E' both_ ORDER BY distance LIMIT $3) n\',\n            active.vector_type, active.chunk_table, near\n        ) INTO offered, distances USING query, readable, wanted, rescored * wanted;');
    EXECUTE definition;
    IF definition NOT LIKE '%USING query, readable, wanted, rescored * wanted;%' OR definition NOT LIKE '%LIMIT $4)%' THEN
        RAISE EXCEPTION 'readers.nearest has another definition than expected';
    END IF;
END $$;

-- The planner uses statistics of all tenants' rows for a reader of one tenant, too, where an operator leaks nothing: EXPLAIN told
-- how many titles lie between two words. Of an expression it has none (docs/adr/0109-statistics-of-readers.md).
CREATE FUNCTION divide_view(name text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format(
        'CREATE OR REPLACE VIEW tenant_readers.%1$I WITH (security_barrier) AS'
        ' SELECT %2$s FROM readers.%1$I WHERE tenant = (SELECT tenant_readers.tenant())',
        name, (
            SELECT string_agg(format(
                CASE WHEN a.atttypid = 'text'::regtype THEN '%1$I || '''' AS %1$I' ELSE '%1$I' END, a.attname
            ), ', ' ORDER BY a.attnum)
            FROM pg_attribute a
            WHERE a.attrelid = format('readers.%I', name)::regclass AND a.attnum > 0 AND NOT a.attisdropped
        )
    );
END $$;
REVOKE EXECUTE ON FUNCTION divide_view FROM PUBLIC;

DO $$
DECLARE
    definition text := pg_get_functiondef('point_readers_at(text, text)'::regprocedure);
    before     text := $view$CREATE OR REPLACE VIEW tenant_readers.chunks WITH (security_barrier) AS
    SELECT * FROM readers.chunks WHERE tenant = (SELECT tenant_readers.tenant());$view$;
BEGIN
    ASSERT strpos(definition, before) > 0;
    EXECUTE replace(definition, before, 'PERFORM divide_view(''chunks'');');
END $$;
SELECT divide_view('documents');
SELECT point_readers_at(chunk_table, name) FROM generations WHERE state = 'active';

-- Golden questions quote passages and answers, so the query service sees those of the tenant that its transaction names
-- (docs/adr/0053-rows-by-tenant.md). divide_rows() divides them, as it divides what 0041 names.
CREATE OR REPLACE FUNCTION undivided_tables() RETURNS text[] LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY['index_state', 'audit_differences', 'connectors']
$$;

-- As in 0041; a judgement is visible where its question is.
CREATE OR REPLACE FUNCTION divide_table(target regclass) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    condition text;
BEGIN
    IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = target AND attname = 'tenant' AND NOT attisdropped) THEN
        condition := 'tenant = (SELECT current_setting(''penstock.tenant'', true))';
    ELSIF EXISTS (SELECT FROM pg_attribute WHERE attrelid = target AND attname = 'query_id' AND NOT attisdropped) THEN
        condition := format('EXISTS (SELECT FROM public.eval_queries q WHERE q.id = %s.query_id OFFSET 0)', target);
    ELSE
        condition := format('EXISTS (SELECT FROM public.documents d WHERE d.id = %s.document_id OFFSET 0)', target);
    END IF;
    EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', target);
    EXECUTE format('CREATE POLICY all_rows ON %s USING (true)', target);
    EXECUTE format(
        'CREATE POLICY rows_of_a_tenant ON %s AS RESTRICTIVE TO penstock_query USING (%s)', target, condition
    );
END $$;

DO $$
DECLARE
    definition text := pg_get_functiondef('divide_rows(integer)'::regprocedure);
BEGIN
    EXECUTE replace(definition, $of$a.attname IN ('tenant', 'document_id')$of$,
        $of$a.attname IN ('tenant', 'document_id', 'query_id')$of$);
END $$;

-- An evaluation asks the questions of one tenant after another.
CREATE FUNCTION golden_tenants() RETURNS SETOF text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT DISTINCT tenant FROM eval_queries ORDER BY tenant
$$;
REVOKE EXECUTE ON FUNCTION golden_tenants FROM PUBLIC;

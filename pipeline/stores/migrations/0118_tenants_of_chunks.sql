-- Each row of a chunk table names its tenant, so that the policy that divides the table compares a text instead of looking
-- up a document for each row (docs/adr/0127). A row that was written before, or by a worker of an older version, names none.
-- Tables that exist keep their policy.
CREATE OR REPLACE FUNCTION complete_chunk_tables() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    chunks regclass;
    added  text;
BEGIN
    FOR chunks IN SELECT DISTINCT to_regclass(quote_ident(chunk_table)) FROM generations LOOP
        FOREACH added IN ARRAY ARRAY['in_graph boolean NOT NULL DEFAULT true', 'tenant text'] LOOP
            IF chunks IS NOT NULL AND NOT EXISTS (
                SELECT FROM pg_attribute
                WHERE attrelid = chunks AND attname = split_part(added, ' ', 1) AND NOT attisdropped
            ) THEN
                EXECUTE format('ALTER TABLE %s ADD COLUMN %s', chunks, added);
            END IF;
        END LOOP;
    END LOOP;
END $$;

-- As in 0067. A row of a chunk table that names no tenant has that of its document, which is looked up; and so is that of every
-- row where no index holds the tenants, as in a table that exists: rows are counted by the index alone, before a search decides
-- how to read them, and would each be read from the table.
CREATE FUNCTION condition_of_a_tenant(target regclass) RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    named    constant text := 'tenant = (SELECT current_setting(''penstock.tenant'', true))';
    document constant text :=
        format('EXISTS (SELECT FROM public.documents d WHERE d.id = %s.document_id OFFSET 0)', target);
    columns  text[] := ARRAY(
        SELECT attname FROM pg_attribute WHERE attrelid = target AND attnum > 0 AND NOT attisdropped
    );
BEGIN
    RETURN CASE
        WHEN 'in_graph' = ANY(columns) AND EXISTS (
            SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indexrelid
            WHERE i.indrelid = target AND a.attname = 'tenant'
        ) THEN format('CASE WHEN tenant IS NULL THEN %s ELSE %s END', document, named)
        WHEN 'in_graph' = ANY(columns) THEN document
        WHEN 'tenant' = ANY(columns) THEN named
        WHEN 'query_id' = ANY(columns)
            THEN format('EXISTS (SELECT FROM public.eval_queries q WHERE q.id = %s.query_id OFFSET 0)', target)
        ELSE document
    END;
END $$;
REVOKE EXECUTE ON FUNCTION condition_of_a_tenant FROM PUBLIC;

CREATE OR REPLACE FUNCTION divide_table(target regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', target);
    EXECUTE format('CREATE POLICY all_rows ON %s USING (true)', target);
    EXECUTE format(
        'CREATE POLICY rows_of_a_tenant ON %s AS RESTRICTIVE TO penstock_query USING (%s)',
        target, condition_of_a_tenant(target)
    );
END $$;

-- As in 0116. A table that the version before makes, while workers of this one run, gets the column before its first row.
DO $$
DECLARE
    definition text := pg_get_functiondef('divide_as_documents(regclass)'::regprocedure);
    beginning  text := E'BEGIN\n';
BEGIN
    IF position(beginning IN definition) = 0 THEN
        RAISE EXCEPTION 'divide_as_documents has no beginning';
    END IF;
    EXECUTE replace(definition, beginning, beginning || $new$    IF NOT EXISTS (
        SELECT FROM pg_attribute WHERE attrelid = target AND attname = 'tenant' AND NOT attisdropped
    ) THEN
        EXECUTE format('ALTER TABLE %s ADD COLUMN tenant text', target);
    END IF;
$new$);
END $$;

SELECT complete_chunk_tables();

-- Postgres moves a condition of a reader's below a barrier where its operator is leakproof, as `text < 'b'` and `acl_tags[1] < 'b'`
-- are, and puts the view's expression into it afterwards: it was evaluated on passages and access sets of all tenants, before
-- they were joined with the documents of one, and EXPLAIN ANALYZE said how many rows were left. No condition on a column that is
-- made by a volatile function is moved (docs/adr/0109-statistics-of-readers.md). Metadata and headings are such, too: the outer
-- join that adds metadata becomes an inner one with `metadata IS NOT NULL`, and `metadata['a']` was evaluated on all tenants' rows.
CREATE OR REPLACE FUNCTION divide_view(name text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format(
        'CREATE OR REPLACE VIEW tenant_readers.%1$I WITH (security_barrier) AS'
        ' SELECT %2$s FROM readers.%1$I WHERE tenant = (SELECT tenant_readers.tenant())',
        name, (
            SELECT string_agg(format(
                CASE WHEN a.atttypid IN ('text'::regtype, 'text[]'::regtype, 'jsonb'::regtype)
                    THEN 'CASE WHEN clock_timestamp() IS NOT NULL THEN %1$I END AS %1$I' ELSE '%1$I' END, a.attname
            ), ', ' ORDER BY a.attnum)
            FROM pg_attribute a
            WHERE a.attrelid = format('readers.%I', name)::regclass AND a.attnum > 0 AND NOT a.attisdropped
        )
    );
END $$;
SELECT divide_view('documents');
SELECT point_readers_at(chunk_table, name) FROM generations WHERE state = 'active';

-- A login of connectors that is bound to tenants learns nothing of other tenants' texts from plans
-- (docs/adr/0126-plans-of-bound-logins.md).

-- What the login is bound to; NULL: nothing. Declared IMMUTABLE, which they are not, so that the planner calls them and a
-- plan has their results as constants: `tenant = ANY ('{…}')` for a bound login, and no condition at all for another one.
-- They are for the policies below alone. Should a plan outlive a change, rows_of_a_login holds, which asks at each execution.
CREATE FUNCTION planned_tenants() RETURNS text[]
LANGUAGE sql IMMUTABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT array_agg(tenant ORDER BY tenant) FROM connector_logins WHERE login = session_user
$$;
CREATE FUNCTION planned_tenants_as_keys() RETURNS jsonb
LANGUAGE sql IMMUTABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT jsonb_object_agg(tenant, true) FROM connector_logins WHERE login = session_user
$$;

-- The name comes first among the table's restrictive policies: of conditions that cost the same, the planner has the first
-- policy's evaluated first. A subscript costs nothing, so no condition of a login's own is evaluated on a row before it.
-- The comparison with the array is for indexes. No bound login sends webhooks.
DO $$
DECLARE
    target text;
BEGIN
    FOREACH target IN ARRAY ARRAY[
        'connectors', 'connector_items', 'connector_sources', 'connector_asks', 'connector_groups', 'connector_principals',
        'connector_memory', 'connector_differences', 'connector_publications', 'connector_freshness', 'uploads'
    ] LOOP
        EXECUTE format(
            'CREATE POLICY planned_rows ON %I AS RESTRICTIVE USING (planned_tenants() IS NULL'
            ' OR ((planned_tenants_as_keys())[tenant] IS NOT NULL AND tenant = ANY (planned_tenants())))', target
        );
    END LOOP;
    FOREACH target IN ARRAY ARRAY['webhooks', 'webhook_deliveries'] LOOP
        EXECUTE format('CREATE POLICY planned_rows ON %I AS RESTRICTIVE USING (planned_tenants() IS NULL)', target);
    END LOOP;
END $$;

-- What ANALYZE learns of texts is of all tenants, and estimates show it. While a login is bound, these tables have no
-- statistics of columns that hold more than numbers and times. Of those that our statements compare, the planner is given
-- some that say nothing of what is stored: five sources, in each of which everything has a name of its own. Without them it
-- takes a source for a few rows, and reads it all for each look-up. Each change of a column ends the plans that sessions
-- have prepared for the table, which is needed of webhooks too; no bound login has any plan of those to look at.
CREATE FUNCTION columns_to_conceal() RETURNS TABLE (of_table text, name text, concealed boolean)
LANGUAGE sql STABLE SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT c.relname, a.attname, coalesce(a.attstattarget, -1) = 0
    FROM pg_policy p JOIN pg_class c ON c.oid = p.polrelid JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE p.polname = 'planned_rows' AND a.attnum > 0 AND NOT a.attisdropped
        AND (a.attname = 'tenant' OR NOT starts_with(c.relname, 'webhook')) AND a.atttypid NOT IN (
            'bigint'::regtype, 'integer'::regtype, 'double precision'::regtype, 'boolean'::regtype, 'timestamptz'::regtype)
    ORDER BY c.relname, a.attnum
$$;
CREATE FUNCTION conceal_texts() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    conceals boolean := EXISTS (SELECT FROM connector_logins)
        AND to_regproc('pg_restore_attribute_stats') IS NOT NULL;  -- new in Postgres 18
    part     record;
BEGIN
    FOR part IN
        SELECT c.of_table, c.name, k.values
        FROM columns_to_conceal() WITH ORDINALITY c (of_table, name, concealed, place)
        LEFT JOIN (VALUES
            ('tenant', 1), ('source', 5), ('scope', 4), ('subject', 2), ('kind', 3), ('external_id', -1), ('principal', -1),
            ('tag', -1), ('name', -1), ('document_id', -1), ('id', -1), ('sha256', -1)
        ) k (name, values) ON k.name = c.name
        ORDER BY c.place
    LOOP
        EXECUTE format('ALTER TABLE public.%I ALTER COLUMN %I SET STATISTICS %s', part.of_table, part.name,
            CASE WHEN conceals THEN 0 ELSE -1 END);
        CONTINUE WHEN NOT conceals;
        EXECUTE 'SELECT pg_clear_attribute_stats(''public'', $1, $2, false)' USING part.of_table, part.name;
        CONTINUE WHEN part.values IS NULL;
        EXECUTE 'SELECT pg_restore_attribute_stats(''schemaname'', ''public'', ''relname'', $1, ''attname'', $2,'
            ' ''inherited'', false, ''null_frac'', 0::real, ''n_distinct'', $3)'
            USING part.of_table, part.name, part.values::real;
    END LOOP;
END $$;
CREATE FUNCTION conceal_texts_of_logins() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    PERFORM conceal_texts();
    RETURN NULL;
END $$;
CREATE TRIGGER conceal_texts AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON connector_logins
    FOR EACH STATEMENT EXECUTE FUNCTION conceal_texts_of_logins();

-- A dump holds no statistics: `penstock migrate` gives the planner these again after a restore. It also conceals what later
-- migrations, and a server that had no such statistics, have left.
CREATE FUNCTION conceal_restored_texts() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM connector_logins) AND to_regproc('pg_restore_attribute_stats') IS NOT NULL AND (
        EXISTS (SELECT FROM columns_to_conceal() WHERE NOT concealed) OR NOT EXISTS (
            SELECT FROM pg_stats WHERE schemaname = 'public' AND tablename = 'connector_items' AND attname = 'source'
                AND n_distinct = 5 AND most_common_vals IS NULL
        )
    ) THEN
        PERFORM conceal_texts();
    END IF;
END $$;
REVOKE EXECUTE ON FUNCTION columns_to_conceal, conceal_texts, conceal_texts_of_logins, conceal_restored_texts FROM PUBLIC;
SELECT conceal_restored_texts();

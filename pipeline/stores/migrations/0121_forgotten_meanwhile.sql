-- Whether a person, or the whole tenant, was forgotten while an answer was written: what the answer would leave is not stored then.
-- The tenant is the one that the transaction names, so nobody learns of other tenants' people (docs/adr/0053-rows-by-tenant.md).
CREATE FUNCTION is_forgotten_since(subjects bytea[], since timestamptz) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT EXISTS (
        SELECT FROM person_floors f WHERE f.tenant = current_setting('penstock.tenant', true)
            AND f.subject = ANY (subjects) AND f.observed_at >= since
    )
$$;
REVOKE EXECUTE ON FUNCTION is_forgotten_since FROM PUBLIC;

-- The lock of generations, which detect takes for every batch, as a lock of this table, which has no columns and no rows:
-- Postgres gives a table's locks to logins with privileges on it alone, and a superuser is not needed to withhold them
-- (docs/adr/0069-locks-with-privileges.md).
CREATE TABLE generations_lock (CHECK (false));

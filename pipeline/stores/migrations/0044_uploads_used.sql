-- What uploads hold is summed at every upload, for the quotas of a tenant and of all: from this index alone.

CREATE INDEX uploads_by_use ON uploads (tenant, size) WHERE deleted_at IS NULL;

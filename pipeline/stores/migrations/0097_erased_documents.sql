-- Documents that were erased, so that retention finds what is left of them: versions before 0094 kept their events and the standing
-- answers that were made from them (docs/retention.md).
CREATE INDEX documents_erased ON documents (id) WHERE erased_at IS NOT NULL;

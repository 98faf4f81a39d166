"""Webhooks: what became searchable or was withdrawn, as signed CloudEvents for receivers over HTTP
(docs/adr/0066-webhooks.md)."""

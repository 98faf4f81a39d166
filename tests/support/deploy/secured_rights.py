"""The rights that each login must lack on each server: one of every kind that its role might have been given by
mistake."""

from __future__ import annotations

DENIED = ("permission denied", "security_exception", "AuthorizationFailed", "does not let")
"""How a server's refusal looks in a log."""
POSTGRES_DENIES = {
    "penstock_analyse": (
        "SELECT * FROM uploads",
        "UPDATE documents SET title = ''",
        "INSERT INTO memberships SELECT * FROM memberships",
        "DELETE FROM {chunks}",
    ),
    "penstock_connect": (
        "SELECT * FROM documents",
        "SELECT * FROM document_bodies",
        "SELECT * FROM {chunks}",
        "SELECT * FROM memberships",
        "UPDATE index_state SET seq = 0",
        "SELECT * FROM producer_keys",
    ),
    "penstock_ask": (
        "UPDATE documents SET title = ''",
        "DELETE FROM {chunks}",
        "DELETE FROM manifests",
        "INSERT INTO memberships SELECT * FROM memberships",
        "SELECT * FROM connector_items",
        "CREATE TABLE mine ()",
    ),
    "penstock_vectors": (
        "DROP TABLE {chunks}",
        "UPDATE generations SET state = 'retired'",
        "SELECT * FROM uploads",
        "UPDATE producers SET allow = ARRAY['a/b']",
        "DELETE FROM producer_keys",
    ),
}
ELASTICSEARCH_DENIES = {
    "penstock_ask": (
        ("POST", "/chunks-g1/_doc"),
        ("DELETE", "/chunks-g1/_doc/1"),
        ("DELETE", "/chunks-g1"),
        ("GET", "/_cluster/state"),
    ),
    "penstock_keywords": (("DELETE", "/chunks-g1"), ("PUT", "/chunks-g2"), ("PUT", "/_security/user/me")),
    "penstock_migrate": (("PUT", "/others"), ("GET", "/.security/_search"), ("PUT", "/_security/user/me")),
}

KAFKA_DENIES_WRITING = {
    "penstock_analyse": ("documents.live.v1", "documents.indexed.v1", "identities.v1"),
    "penstock_connect": ("index.live.v1", "documents.indexed.v1", "dead-letters.v1"),
    "penstock_detect": ("documents.live.v1", "identities.v1"),
    "penstock_vectors": ("documents.live.v1", "index.live.v1", "identities.v1"),
    "penstock_keywords": ("documents.backfill.v1", "index.backfill.v1", "conversations.live.v1"),
    "penstock_ask": ("documents.live.v1", "identities.v1", "index.live.v1"),
}
KAFKA_DENIES_READING = {
    "penstock_analyse": ("documents.live.v1", "index.live.v1", "conversations.live.v1"),
    "penstock_connect": ("documents.live.v1", "identities.v1", "index.live.v1"),
    "penstock_detect": ("index.live.v1", "dead-letters.v1"),
    "penstock_vectors": ("documents.live.v1", "identities.v1"),
    "penstock_ask": ("documents.live.v1", "conversations.live.v1", "index.live.v1"),
}

-- Receivers of webhooks that also want the news of contradictions: others would not know the type.
ALTER TABLE webhooks ADD COLUMN conflicts boolean NOT NULL DEFAULT false;

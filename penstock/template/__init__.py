"""A source with its playground, which ``penstock connector new`` copies."""

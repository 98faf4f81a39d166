"""A source and its playground, which ``penstock connector new`` copies."""

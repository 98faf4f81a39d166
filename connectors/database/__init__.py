"""Tables of databases: read by SQL, or from a topic of change data capture."""

"""Random changes, faults in between, calm, then the oracle: both stores equal the model exactly."""

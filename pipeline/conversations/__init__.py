"""Per-member question and answer history: taken in from Kafka, grouped, embedded in the background."""

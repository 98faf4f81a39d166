"""The one place that consumes Kafka. faust lives here and nowhere else; a stage is a plain object given to it."""

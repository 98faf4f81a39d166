"""The only package that talks to Kafka (besides faust in ``pipeline.stream``): client, producer, admin, offsets."""

"""The only package that talks to Kafka (besides faust in ``pipeline.stream``): client, producer, admin, offsets.

Importing it makes all consumers of the process read hostile batches as ``pipeline.kafka.batches`` says.
"""

from pipeline.kafka import batches

batches.install()

"""The public package of Penstock: what programs of others may import (docs/public-api.md).

- ``penstock.source``: to write a source of documents of your own.
- ``penstock.wire``: to publish and read the messages of Kafka's topics.
- ``penstock.client``: to ask the query service.

Everything else (``topics``, ``pipeline``, ``connectors``, ``query``, ``canary``, ``cli``, ``deploy``) is internal.
"""

"""The query service for language-model clients: the tools `search` and `fetch`, over streamable HTTP and stdio."""

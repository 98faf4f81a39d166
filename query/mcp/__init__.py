"""The query service for language-model clients: its tools, over streamable HTTP and stdio."""

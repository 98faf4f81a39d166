"""Text → vectors: any OpenAI-compatible server, or the local MiniLM. One setting chooses."""

"""The contract on the wire: messages, headers, topics. Imports nothing else of Penstock."""

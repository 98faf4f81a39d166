"""What the workers do: detect, vectors, keywords, and the small tasks beside them. No faust here."""

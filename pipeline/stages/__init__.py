"""The work of the workers: detect, vectors, keywords, and the small tasks beside them. No faust here."""

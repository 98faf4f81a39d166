"""The client of the query service. Nothing is public here yet."""

__all__: list[str] = []

"""Deterministic simulation of the whole pipeline, and exhaustive search of its two protocols. See docs/adr/0041."""

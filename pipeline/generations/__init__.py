"""Generations: one embedding model with one way of cutting, built beside the active one, cut over to, rolled back."""

"""Tests for knowledge: a proposed edit over the live index, and the answers that it would change. docs/preview.md."""

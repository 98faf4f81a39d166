"""Standing questions: kept answers whose asker learns when they no longer hold (docs/standing.md)."""

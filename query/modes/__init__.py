"""Answer modes: whether a question is answered from whole documents or from retrieved passages (docs/modes.md)."""

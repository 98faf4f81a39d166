"""How good the answers are: rankings against judgements, answers against their passages. docs/evaluation.md."""

"""The attacks, one per module: each computes a guess from the attacker's view, and figures from guess and truth."""

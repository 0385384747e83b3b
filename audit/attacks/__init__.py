"""The attacks, one per module: each from what an attacker has to a guess, and from guess and truth to figures."""

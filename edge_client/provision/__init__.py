"""Templates of what an agent's host needs (package data)."""

"""The authority and the signing keys."""

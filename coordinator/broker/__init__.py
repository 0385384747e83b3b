"""Configuration and access lists of the broker."""

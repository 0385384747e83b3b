"""The pure round engine and its records."""

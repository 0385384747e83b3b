"""Commands and their settings."""

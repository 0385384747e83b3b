"""The merging of a server."""

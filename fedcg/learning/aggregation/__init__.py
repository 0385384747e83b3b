"""Aggregation on the server."""

"""Artifacts in chunks."""

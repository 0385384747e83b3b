"""Reads data sources into tensors."""

"""Sends and receives signed messages."""

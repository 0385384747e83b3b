"""Signed messages in and out."""

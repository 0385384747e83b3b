"""Signed messages in and out: what is accepted, and what is published."""

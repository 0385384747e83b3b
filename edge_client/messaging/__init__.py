"""Signed messages in and out: checks of incoming ones, publishing of outgoing ones."""

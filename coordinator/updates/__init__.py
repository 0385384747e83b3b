"""Receives updates (validate, store durably, send a receipt), and serves artifacts that devices may fetch."""

"""Benchmark of a whole coordinator with many sessions, and of those who watch its page."""

"""Benchmarks; nothing imports them."""

"""Benchmark of predictions."""

"""Benchmarks of training and merging, and the plain references."""

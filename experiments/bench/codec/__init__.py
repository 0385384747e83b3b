"""Benchmark of codecs."""

"""Benchmarks of transfers and rounds."""

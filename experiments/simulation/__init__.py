"""Batches of simulated runs and their records."""

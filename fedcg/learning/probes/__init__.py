"""Probe images that a cohort shares, what extractors make of them, and extractors that are fitted to the mean of that."""

"""Moments of the cohort's features, and heads calibrated on or solved from them."""

"""Splits, generators and discriminators, built from the feature shape."""

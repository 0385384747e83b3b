"""Simulations in processes and on Ray."""

"""Simulations of many clients in one process."""

"""Processes and Ray."""

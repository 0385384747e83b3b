"""Carries out an audit: attacks in processes side by side, finished ones kept."""

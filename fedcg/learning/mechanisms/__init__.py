"""Mechanisms around a method: they make a client's update reveal less, and account for the privacy spent."""

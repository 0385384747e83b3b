"""Mechanisms around a method: what makes a client's update reveal less, and what that guarantee has cost so far."""

"""The audit: what left a device, and what an attacker can learn from it."""

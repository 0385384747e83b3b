"""The audit: what left a device, and what an attacker makes of it."""

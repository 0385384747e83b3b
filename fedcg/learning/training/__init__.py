"""The loops and losses of a device."""

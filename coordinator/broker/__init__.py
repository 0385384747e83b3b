"""Configuration and access lists of the broker; the embedded broker."""

"""The wire: parts, messages, artifacts and transports. Must not know torch or training."""

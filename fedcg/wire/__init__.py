"""The wire: parts, messages, artifacts and transports. Knows nothing of torch or of training."""

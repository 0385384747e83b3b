"""The coordinator service: rounds, updates, aggregation, HTTP API."""

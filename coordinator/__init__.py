"""The coordinator service: rounds, ingest, aggregation, HTTP API."""

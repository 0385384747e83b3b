"""The way of an update in: receive, validate, make durable, receipt; and what devices may fetch."""

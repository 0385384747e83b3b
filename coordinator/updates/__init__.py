"""Updates in: receive, validate, make durable, receipt; artifacts out: those that devices may fetch."""

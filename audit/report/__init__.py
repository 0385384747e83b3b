"""What an audit found, for a program (JSON), for a person (one HTML page) and for a gate."""

"""The round engine, as a pure state machine, and its records."""

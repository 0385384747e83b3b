"""The pure state machine of the protocol, without clock, disk or network."""

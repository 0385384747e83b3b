"""The pure state machine of the protocol; knows no clock, disk or network."""

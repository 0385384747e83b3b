"""The link to a broker, on paho, and its twin in one process."""

"""The link to a broker, on paho."""

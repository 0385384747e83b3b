"""Messages and artifacts between this device and its coordinator: the MQTT link, transfers and the HTTPS carrier."""

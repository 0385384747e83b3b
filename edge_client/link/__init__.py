"""Messages and artifacts between this device and its coordinator: the session's link over MQTT, transfers, and the HTTPS carrier."""

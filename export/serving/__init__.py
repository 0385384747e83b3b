"""Predictions over HTTP and MQTT."""

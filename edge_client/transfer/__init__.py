"""Artifacts up and down, over MQTT or HTTPS."""

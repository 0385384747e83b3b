"""The agent on an edge device: session, private store, firewall, trainer."""

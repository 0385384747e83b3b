"""The agent on an edge box: session, private store, firewall, trainer."""

"""The agent's loop, which connects the other packages."""

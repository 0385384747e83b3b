"""The log of agent and coordinator: what its lines say about events, and how they are written."""

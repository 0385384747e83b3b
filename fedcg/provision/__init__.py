"""The agent.toml of a device, which both sides write. One template, because a bundle and an enrolled device must not differ."""

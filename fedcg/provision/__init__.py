"""What both sides write for a device: its agent.toml. One template, because a bundle and an enrolled box must not differ."""

"""What an attacker has and what is true, as different types, read from a recording and from the device's own data."""

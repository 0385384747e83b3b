"""Files that are encrypted: the format of an archive, and the passphrase that a person gives for it."""

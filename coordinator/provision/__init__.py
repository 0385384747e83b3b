"""What the coordinator generates for others: certificates, broker configuration, device bundles."""

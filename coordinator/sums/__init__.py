"""The coordinator's part in sums that nobody looks into (`fedcg.wire.sums`)."""

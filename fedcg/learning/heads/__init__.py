"""What sums over the cohort's features say of its heads: moments, and heads that are calibrated or solved from them."""

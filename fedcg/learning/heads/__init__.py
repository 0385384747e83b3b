"""What sums over the cohort's features say of its heads: moments, heads calibrated or solved from them, a judgement of extractors."""

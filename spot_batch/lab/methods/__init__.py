"""Other ways to draft, for comparison: published baselines and oracles."""

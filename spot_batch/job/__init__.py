"""The job spec: what a person writes, checked once, and what of it decides data/."""

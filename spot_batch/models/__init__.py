"""What runs: a family is an adapter over transformers' modules, with our attention and cache."""

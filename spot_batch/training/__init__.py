"""Training: the bundled target's recipe and the corpus it learns from."""

"""What a model is, without torch: families, facts, files, shapes, tokenizer."""

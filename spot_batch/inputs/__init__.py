"""Prompts in: pin the input, read rows of it, render prompts, address samples.

Pure pyarrow and the standard library; the tokenizer is handed in. `datasets` is loaded for hub
datasets only.
"""

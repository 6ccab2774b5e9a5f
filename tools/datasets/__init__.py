"""Corpora, tokenizers and token files."""

"""Text to token ids and back, one interface for every tokenizer type."""

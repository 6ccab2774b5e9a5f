"""Checkpoints laid out by layer, written atomically, read back bit for bit."""

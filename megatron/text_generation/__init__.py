"""Sampling continuations from a trained decoder."""

"""Measuring on emulated hosts."""

"""Command-line tools beside training."""

"""A gradient's journey: partition into buckets, readiness, launch, wait, and how long it took."""

"""Metrics: what is recorded each step and where it goes (console, metrics.jsonl, TensorBoard, wandb)."""

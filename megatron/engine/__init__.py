"""`train_batch` and `eval_batch` over DeepSpeed; the only package that touches DeepSpeed engines."""

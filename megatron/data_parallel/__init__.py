"""A gradient's journey: partition into buckets, readiness, launch, wait, and how long it took.

Read in this order: `ready_order` (rehearsal: when does backward finish which gradient), `partition` (which group,
which bucket), `grad_reducer` (hooks, readiness, launch order), `grad_bucket` (buffer, launch, wait), `exposure` (how
much of it the training thread had to wait for).
"""

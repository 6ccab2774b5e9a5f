"""Master weights, loss scale, global norm, clipping, learning rate and the update, on the reducer's buckets."""

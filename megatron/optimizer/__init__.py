"""Master weights, loss scale, global norm, clipping, learning rate and the update, on what the reducer hands over."""

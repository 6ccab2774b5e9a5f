"""The decoder as a flat list of layers; knows no rank, no group and no engine."""

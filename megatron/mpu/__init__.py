"""The rank grid, its process groups, and the layers that are split over the tensor-parallel group."""

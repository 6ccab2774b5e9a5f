"""Indexed token files, sample indices, blending, and a loader that resumes at the sample where it stopped."""

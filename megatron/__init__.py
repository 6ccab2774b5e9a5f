"""A NeoX-style training framework whose gradient reduction runs under backward.

Importing this package imports nothing.
"""

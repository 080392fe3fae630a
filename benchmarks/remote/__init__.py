"""Blocks in stores that machines share, beside the clients of those stores alone."""

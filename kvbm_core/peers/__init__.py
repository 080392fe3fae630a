"""Peers: blocks that another instance has in its host memory or on its disk, copied from there."""

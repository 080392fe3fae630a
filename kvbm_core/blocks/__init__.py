"""Slots, which block is in which, and who holds them."""

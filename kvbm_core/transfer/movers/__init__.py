"""Movers: one per kind of lower tier, on each rank."""

"""Tiers: slots, registry, policy and leases of one place where blocks can be."""

"""A request trace replayed through the product's own tiers, without an engine: which admission policy serves
whom.
"""

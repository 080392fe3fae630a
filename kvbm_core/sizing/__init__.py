"""How many gigabytes: what a model's KV takes, what a load reuses, and what that means for each tier."""

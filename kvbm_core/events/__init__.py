"""KV events: what blocks are in which tier, told to routers."""

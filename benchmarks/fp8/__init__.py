"""KVBM_REMOTE_CODEC=fp8: what it does to answers to prompts whose KV came back rounded, and its speed."""

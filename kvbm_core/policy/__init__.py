"""Which block goes when room is needed, and which block comes in: one policy per file."""

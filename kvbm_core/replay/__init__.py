"""Request traces, and the leader with its tiers serving one without an engine."""

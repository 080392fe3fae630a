"""What several machines need of each other: who may speak, and where whoever speaks is."""

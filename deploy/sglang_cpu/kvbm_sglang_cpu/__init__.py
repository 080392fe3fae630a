"""What SGLang's HiCache misses on a machine without a GPU. For tests only."""

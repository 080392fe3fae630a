"""Leader, worker and the channel between them."""

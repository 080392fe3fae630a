"""Stores that machines share: engines that keep objects under names, and records of blocks on top of them."""

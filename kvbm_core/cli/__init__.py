"""The ``kvbm`` command."""

"""``kvbm doctor``: checks of a machine and of settings, one function each, run side by side."""

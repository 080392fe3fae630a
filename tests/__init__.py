"""A package, as another one of this name may be installed, and benchmarks import tests.engines."""

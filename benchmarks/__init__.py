"""Programs that drive a real engine: the demo and benchmarks (tests.engines starts the engines)."""

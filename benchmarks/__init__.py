"""Programs that drive a real engine: the demo, benchmarks, and what they share with the engine tests."""

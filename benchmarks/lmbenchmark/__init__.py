"""LMBenchmark's synthetic conversations against kvbm and a baseline. LMBenchmark is the user's checkout."""

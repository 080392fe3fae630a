"""Real SGLang on this machine, with kvbm and with its own storage backends: throughput, TTFT, exactness."""

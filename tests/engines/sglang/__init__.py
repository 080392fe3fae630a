"""Real SGLang on a CPU, in an environment of its own."""

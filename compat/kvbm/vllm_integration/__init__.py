"""Names under which command lines written for KVBM load the vLLM connector."""

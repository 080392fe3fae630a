"""What the leader's work costs, beside the managers of vLLM and LMCache: metadata alone, no bytes move."""

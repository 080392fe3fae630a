"""What the bytes of a block depend on besides its tokens: configuration, weights, adapters."""

"""Where the bytes of a block are, as pure arithmetic: no torch, no engine, no memory is touched."""

"""Names of blocks: namespaces, digests and the hash chain of a request."""

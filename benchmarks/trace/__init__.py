"""Which admission policy a request trace speaks for: those of the product and candidates."""

"""Where the bytes of a tier live: one BlockStore or memory per file."""

"""Blocks on a local disk: slots of a preallocated file, each a record that describes and checks itself."""

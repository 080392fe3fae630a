"""A directory that machines share (NFS, Lustre, a local path) as a BlockStore: one file per block."""

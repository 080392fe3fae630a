"""The cache as a library, for programs that are no engine; `import kvbm` hands it on."""

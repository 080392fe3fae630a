"""For tests only: conformance suites for implementations, naive twins of the clever parts."""

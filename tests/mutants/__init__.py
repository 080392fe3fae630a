"""Mends undone one by one by hand (mutants), and the test that notices each.

A row is what was seen before the mend, the smallest change that brings it back, and the test that has to fail
then. `python -m tests.mutants` plays them; `tests/unit/test_mutants.py` holds that rows and code agree.
"""

"""What kvbm costs and what it saves on a real server: ``python -m benchmarks.serve [--quick]``.

Two servers, one with kvbm and one without a connector, are measured in turns in one run, so that whatever
else the machine does meets both. Only medians and ratios are reported as results.
"""

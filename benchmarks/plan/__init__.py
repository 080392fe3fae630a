"""What ``kvbm plan`` predicts, beside what the real leader then reaches."""

"""The ladder benchmark, which compares ways to average gradients."""

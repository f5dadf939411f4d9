"""Commands that measure a cluster: benchmarks, certificates and metrics."""

"""Benchmarks: settings, reports and their display. torch is imported only by the modules that measure with it."""

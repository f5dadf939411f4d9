"""Benchmarks: settings, reports and their display. Only the modules that measure import torch."""

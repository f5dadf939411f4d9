"""Measurements of single nodes: devices, storage and software versions."""

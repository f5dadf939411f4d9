"""Tests of storage: mounts and exports as values, scratch folders of jobs, and checks from every node."""

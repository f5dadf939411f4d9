"""Demo scenes on a real cluster, which are also acceptance tests."""

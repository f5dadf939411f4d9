"""Machines that differ from the one the tests run on, built for `./test --long`."""

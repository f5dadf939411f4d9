"""The first process of a host. Standard library only, because one runs for every host of a cluster."""

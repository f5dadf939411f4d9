"""Clusters on AWS ParallelCluster: the operator's side, and the side of the head node."""

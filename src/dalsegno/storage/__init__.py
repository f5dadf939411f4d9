"""Storage of a cluster: what each host mounts and exports, scratch folders of jobs, and checks from every node."""

"""What runs as the first process of a host. Standard library only: it lives as long as the host, 64 times over."""

"""The certificate of a cluster: its parts, its verdict and its page."""

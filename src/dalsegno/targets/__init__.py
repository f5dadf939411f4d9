"""The platforms that a cluster can run on: this machine, hosts reached over ssh, and clouds."""

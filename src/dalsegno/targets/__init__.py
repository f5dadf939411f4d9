"""Where a cluster can stand: this machine, and later hosts over SSH and the clouds."""

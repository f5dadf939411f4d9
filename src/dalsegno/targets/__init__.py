"""The machines that a cluster can run on: this machine now; hosts over SSH and the clouds later."""

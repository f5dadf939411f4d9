"""The pages: each module turns the snapshot of the cluster into the parts of one page. Pure."""

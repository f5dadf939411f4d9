"""The pages: each module turns the picture of the cluster into the parts of one page. Pure."""

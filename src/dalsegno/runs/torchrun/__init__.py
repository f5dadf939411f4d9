"""`dalsegno torchrun`: the command line of torchrun, executed by a Dal Segno coordinator and its agents."""

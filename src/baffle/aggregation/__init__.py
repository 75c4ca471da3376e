"""How replies become a sum: in plain, or so that the server learns the sum and nothing else."""

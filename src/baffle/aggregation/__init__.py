"""How replies become a sum: plainly, or so that the server learns the sum and nothing else."""

"""How replies become a sum over clients."""

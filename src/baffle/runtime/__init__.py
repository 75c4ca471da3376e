"""What runs a model: anything that turns weights and a batch into a loss."""

"""What a plan names, loaded and measured before a run starts."""

"""What the paper evaluates, as something that can be run: each of its tables and figures is a target."""

"""Models that the paper trains, with the choices it compares as options."""

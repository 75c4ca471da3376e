"""The models that the paper trains, with the choices that it compares as options."""

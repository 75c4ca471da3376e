"""One call for your own model and your own data (`baffle.fit`), and the run that it gives back."""

"""`baffle.fit`, which trains your own model on your own data in one call, and the run that it returns."""

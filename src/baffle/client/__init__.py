"""One participant: it communicates, computes, and holds a copy of the weights."""

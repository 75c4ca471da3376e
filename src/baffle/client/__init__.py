"""One participant: it talks, it computes, and it holds a copy of the weights."""

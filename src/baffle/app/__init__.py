"""Whole activities, put together from the parts below: a round, a run, its costs."""

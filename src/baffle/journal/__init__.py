"""The record of a run, from which its weights can be rebuilt and checked."""

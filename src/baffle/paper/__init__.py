"""The paper's evaluation: each of its tables and figures is a target of `baffle paper`."""

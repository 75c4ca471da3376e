"""The paper's evaluation as commands: each of its tables and figures is a target that can be run."""

"""A Python program in which some packages cannot be imported, as on a machine that does not have them."""

BLOCK = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def without(*packages: str) -> str:
    """The beginning of a program that cannot import these packages."""
    return BLOCK.format(packages=packages)

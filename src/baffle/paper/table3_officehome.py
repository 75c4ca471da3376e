"""table3-officehome: table3 on the paper's own data."""

from baffle.paper.domains import Domains

TARGET = Domains(
    "table3-officehome",
    "the same as table3 on the paper's own data, OfficeHome",
    settings=("task.data=officehome", "task.pixels=224"),
    compared=("Art", "Clipart", "Product", "Real World", "average"),
)

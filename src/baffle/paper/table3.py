"""table3: clients that see one domain each, on PACS."""

from baffle.paper.domains import Domains

TARGET = Domains(
    "table3",
    "clients of one domain each, on PACS: a frozen MobileNetV2, 40 clients, one local epoch a round",
    settings=("task.data=pacs",),
    compared=("average",),
)

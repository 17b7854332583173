"""Any parallel layout by configuration: ``dtorch.parallelize(module, mesh)`` and what it is built from."""

from dtorch.parallel.describe import Description, describe
from dtorch.parallel.layout import parallelize
from dtorch.parallel.pipeline import assign_layers_to_stages
from dtorch.parallel.schedule import GPipe, Interleaved, OneForwardOneBackward, Schedule

__all__ = [
    "Description", "GPipe", "Interleaved", "OneForwardOneBackward", "Schedule", "assign_layers_to_stages", "describe",
    "parallelize",
]  # fmt: skip

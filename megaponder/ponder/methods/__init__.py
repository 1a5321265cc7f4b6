"""The shipped methods, one folder each: `training.py` and `decoding.py`.  Importing this package registers them.

Families share through the folders `latents` (ponderlm2, ponderlm3) and `aligned` (adaponderlm and the baselines).
"""

from importlib import import_module
from pkgutil import iter_modules

for folder in iter_modules(__path__):
    import_module(f"{__name__}.{folder.name}.training")

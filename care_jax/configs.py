"""`care_jax.configs` of a checkout: the files of configs/, which the wheel has under this name."""

import importlib
import sys

sys.modules[__name__] = importlib.import_module("configs")

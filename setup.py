"""Builds the wheel, with `models`, `configs` and `experiments` as subpackages of `care_jax`.

In the checkout they are top-level folders. Installed as such they would collide with the `models`
of other programs, so the wheel moves them and rewrites their imports. An editable install
(`pip install -e .`) uses the checkout as it is.
"""

import pathlib
import re
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

BUNDLED = ("models", "configs", "experiments")
IMPORT = re.compile(rf"^(\s*)from ({'|'.join(BUNDLED)})(?=[. ])", re.MULTILINE)


class BundledBuild(build_py):
    """Copies the bundled folders into the package and rewrites imports of them."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        built = pathlib.Path(self.build_lib)
        (built / "care_jax" / "configs.py").unlink()  # the folder has its name there
        for name in BUNDLED:
            shutil.rmtree(built / name, ignore_errors=True)
            shutil.copytree(
                name,
                built / "care_jax" / name,
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )
        for path in (built / "care_jax").rglob("*.py"):
            path.write_text(IMPORT.sub(r"\1from care_jax.\2", path.read_text()))


setup(cmdclass={"build_py": BundledBuild})

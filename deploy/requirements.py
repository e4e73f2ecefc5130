"""Prints the dependencies of pyproject.toml: `python requirements.py tpu data` with these extras.

The image installs them in a layer below the code; pip alone would need the code for that.
"""

import pathlib
import sys
import tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
if unknown := set(sys.argv[1:]) - extras.keys():
    sys.exit(f"error: pyproject.toml has no extra {sorted(unknown)[0]!r}, only {sorted(extras)}")
print(*project["dependencies"], *(line for name in sys.argv[1:] for line in extras[name]), sep="\n")

"""Prints what shoal and the named extras of it need, a requirement a line.

``python tools/requirements.py dev`` reads pyproject.toml, so that what others made can be installed while
shoal itself is being built.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # scikit-build-core brings it along

project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
print(*project["dependencies"], sep="\n")
for extra in sys.argv[1:]:
    print(*project["optional-dependencies"][extra], sep="\n")

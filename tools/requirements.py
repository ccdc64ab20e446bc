"""Print the requirements of shoal and of the given extras, one per line.

``python tools/requirements.py dev`` reads pyproject.toml, so that dependencies can be installed before shoal
is built.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # installed with scikit-build-core

project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
print(*project["dependencies"], sep="\n")
for extra in sys.argv[1:]:
    print(*project["optional-dependencies"][extra], sep="\n")

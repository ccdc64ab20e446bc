"""Write the digits of examples/digits.py as a table for digits.cc.

    $ python examples/cpp/digits_csv.py digits.csv

A line is a label and 64 pixels from 0 to 16; the 360 images of the test are last.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

images, labels = load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(
    images, labels, test_size=0.2, random_state=0, stratify=labels
)
rows = [
    [label, *image.astype(int)] for label, image in zip([*train_y, *test_y], [*train_x, *test_x], strict=True)
]
Path(sys.argv[1]).write_text("".join(",".join(map(str, row)) + "\n" for row in rows))

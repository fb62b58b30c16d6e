"""What the tests of the actions share, the facts of a healthy cluster among them."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from actions.conftest import *  # noqa: F403

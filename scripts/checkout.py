"""Imported by scripts that run from a checkout that nobody installed: its package is found all the same."""

import sys
from pathlib import Path

if str(Path(__file__).parents[1]) not in sys.path:
    sys.path.append(str(Path(__file__).parents[1]))

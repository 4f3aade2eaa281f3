"""Starts the runner by its path, in an environment that has no vToken."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from peer_runner.serve import main

sys.path.pop(0)  # the neighbours' names there are not for others to import
main()

"""These tests share the controller's processes with the folder above, and the service's house with its folder."""

import os
import sys
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "service")]

"""These tests share the controller process of the folder above."""

import os
import sys
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
sys.path.append(str(Path(__file__).parent.parent))

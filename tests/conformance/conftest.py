"""These tests share the house of the service's tests, and the clients' registry."""

import os
import sys
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
_TESTS = Path(__file__).parent.parent
sys.path += [str(_TESTS / "service"), str(_TESTS / "clients"), str(_TESTS)]

"""These tests share the conformance suite, the proxy that cuts connections, and the controller process of the folder above."""

import os
import sys
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
_TESTS = Path(__file__).parent.parent
sys.path += [str(_TESTS / "service"), str(_TESTS / "conformance"), str(_TESTS / "faults"), str(_TESTS)]

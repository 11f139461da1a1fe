"""What the guardian keeps in memory for a whole run is the command line and no more."""

import subprocess
import sys
from pathlib import Path

import fourstroke


def test_the_guardian_loads_nothing_heavy():
    heavy = ("torch", "ray", "vllm", "transformers", "matplotlib", "sqlite3")
    code = f"import sys, fourstroke.orchestration.guardian; print([name for name in {heavy} if name in sys.modules])"

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(fourstroke.__file__).parent.parent)},
    )

    assert done.stdout == "[]\n"

"""What the documentation of the prefix cache shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[4] / "docs" / "kv-prefix-cache.md"


def test_the_program_of_the_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    program = tmp_path / "program.py"
    program.write_text(source)
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip() == source.rstrip().rpartition("# ")[2]

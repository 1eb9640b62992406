"""Asks each module for help, as `python -m MODULE --help` does, and writes how it ended to a file.

python tests/benchmarks/command_lines.py OUTPUT.json MODULE...
"""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    output, *modules = sys.argv[1:]
    ended = {}
    for module in modules:
        sys.argv = [module, "--help"]
        code, printed = None, io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = end.code
        ended[module] = (code, printed.getvalue())
    Path(output).write_text(json.dumps(ended))

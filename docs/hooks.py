"""Hooks of mkdocs: the help texts of the command line are inserted where a page says ``<!-- help of plan -->``."""

import os
import re
import subprocess
import sys
from typing import Any


def help_of(command: str) -> str:
    """What ``autoshard COMMAND --help`` prints, 100 columns wide."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    arguments = [sys.executable, "-m", "autoshard", *command.split(), "--help"]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout


def on_page_markdown(markdown: str, **_: Any) -> str:
    """See the user's guide of mkdocs."""
    return re.sub(r"<!-- help of (\w+) -->", lambda match: f"```text\n{help_of(match[1])}```", markdown)

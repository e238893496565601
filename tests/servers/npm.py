"""What comes from npm: `.ci/npm.txt` pins it, and `.ci/run` installs it into `.servers`."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = ROOT / ".servers" / "node_modules"
# All in one command: an install removes packages that it does not name.
HINT = "npm install --no-audit --no-fund --no-save --prefix .servers $(cat .ci/npm.txt) (in the repository's root)"

"""`python -m ckptool`."""

from __future__ import annotations

from ckptool.cli.main import main

main()

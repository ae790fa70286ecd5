"""The embedded checkpoint, package data: see README.md beside this file."""
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent

"""HTTP: knows JSON and text, never arrays."""

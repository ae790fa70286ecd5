"""Real clients against a real server: each module drives one client through a conversation of several turns.

    python -m tests.clients --help

A module says what it installs, starts nothing but its client, and reads after each turn what of the prompts came from the
prefix cache. README.md holds the table of record. The Python SDKs also run as tests (tests/test_clients.py).
"""

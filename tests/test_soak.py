"""The soak of bench/soak.py, short: a hundred requests as agents send them, every check of the long one."""
import json
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).resolve().parents[1] / "bench" / "soak.py"


def test_a_hundred_requests():
    done = subprocess.run([sys.executable, str(SOAK), "--requests", "100", "--minutes", "0", "--agents", "4"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["checked"].values()) == {True} and len(result["checked"]) == 6
    assert result["counts"]["turn"] > 40 and result["counts"]["retried"] > 3 and result["evictions"] > 100
    assert result["cached_tokens"] > result["prompt_tokens"] / 2 and "Traceback" not in done.stderr

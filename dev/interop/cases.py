"""Counts the tests of a script: `with case(NAME): ...` prints `ok: NAME` or `FAILED: NAME`; `summary()` ends with the numbers."""
import traceback
from contextlib import contextmanager

passed = failed = 0


@contextmanager
def case(name):
    """One test: fails if its body raises."""
    global passed, failed
    try:
        yield
        passed += 1
        print("ok:", name, flush=True)
    except Exception:
        failed += 1
        print(f"FAILED: {name}\n{traceback.format_exc()}", flush=True)


def summary():
    """Prints the numbers; the exit status: 1 if a test failed, or if none ran."""
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0 or passed == 0)

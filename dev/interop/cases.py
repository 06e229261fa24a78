"""Counts the tests of a script: `with case(NAME): ...` prints `ok: NAME` or `FAILED: NAME`; `summary()` ends with the
numbers."""
import subprocess
import sys
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


def runner(program, folder):
    """Returns a function that runs the program in the folder with its arguments and returns its output, with invalid UTF-8
    replaced as usual; a failure ends the script."""
    def run(*arguments):
        done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, errors="replace", cwd=folder)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
        return done.stdout
    return run


def summary():
    """Prints the numbers; returns the exit status: 1 if a test failed, or if none ran."""
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0 or passed == 0)

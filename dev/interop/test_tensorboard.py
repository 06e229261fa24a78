"""TensorBoard's own reader reads train_gpt's files, also after a kill and a resume: each step once, as in the log.

    test_tensorboard.py BUILD      folder with train_gpt; ends with `N passed, N failed`
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))
import tensorboard_check

program = str(Path(sys.argv[1]).resolve() / "train_gpt")
work = Path(tempfile.mkdtemp(prefix="tensorboard_"))
os.chdir(work)
Path("text.txt").write_text("\n\n".join(f"in the year {i * 37 % 1000} the king gave {i * 11 % 97} sheep" for i in range(2000)))
for command in (["tokenizer", "--input", "text.txt", "--vocab-size", "380", "--output", "tok"],
                ["prepare", "--input", "text.txt", "--output", "text", "--tokenizer", "tok", "--split-documents", "blank"]):
    subprocess.run([program, *command], check=True, capture_output=True)
train = [program, "train", "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "4", "--tokenizer", "tok", "--data-path",
         "text", "--split", "90,10,0", "--seq-length", "24", "--micro-batch-size", "2", "--global-batch-size", "4", "--eval-interval", "20",
         "--eval-iters", "1", "--train-iters", "400", "--save-every", "7", "--threads", "1", "--out", "run", "--tensorboard"]
running = subprocess.Popen(train, stdout=subprocess.DEVNULL)
while not Path("run/latest").exists():
    time.sleep(0.01)
running.send_signal(signal.SIGKILL)
killed = running.wait() == -signal.SIGKILL
subprocess.run([*train, "--resume", "auto"], check=True, capture_output=True)

passed = failed = 0
events = EventAccumulator("run/tensorboard", size_guidance={"scalars": 0}).Reload()
theirs = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
for name, curves in [("TensorBoard reads each step once, as the log has it", theirs),
                     ("the reader of make test agrees", tensorboard_check.read("run/tensorboard"))]:
    try:
        assert killed and len(list(Path("run/tensorboard").iterdir())) == 2
        tensorboard_check.check(curves, "run/log.jsonl")
        assert curves == theirs
        passed += 1
        print("ok:", name)
    except AssertionError as error:
        failed += 1
        print(f"FAILED: {name}: {error}")
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)

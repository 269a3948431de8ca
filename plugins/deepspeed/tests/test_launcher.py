"""DeepSpeed's own launcher starts `rlhf`."""

import base64
import json
import subprocess
import sys


def test_the_launcher_of_deepspeed_may_pass_its_argument() -> None:
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    launcher = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
    command = [*launcher, "--master_port=29611", "--module", "rlhf", "plugins", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"name": "deepspeed"') == 2
    assert "--local_rank=1" in done.stderr + done.stdout

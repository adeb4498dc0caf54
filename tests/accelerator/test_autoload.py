"""A subprocess that imports torch has the device, as its own children have."""

from __future__ import annotations

import subprocess
import sys

from strict.autoload import environment

SEES = """
import multiprocessing, torch

def says():
    held = torch.accelerator.get_memory_info()[1]
    x = torch.ones(3, device=torch.accelerator.current_accelerator()).sum()
    print(x.item(), x.device, torch.accelerator.device_count(), held, flush=True)

if __name__ == "__main__":
    says()
    for how in ("fork", "spawn"):
        child = multiprocessing.get_context(how).Process(target=says)
        child.start()
        child.join()
"""


def test_a_subprocess_and_its_children_have_the_device(tmp_path):
    (tmp_path / "sees.py").write_text(SEES)
    run = _python(str(tmp_path / "sees.py"), env=environment(devices=2, device_bytes=1 << 28))
    assert run.stdout.splitlines() == [f"3.0 strict:0 2 {1 << 28}"] * 3, run.stderr


def test_without_an_order_there_is_no_device():
    env = {name: text for name, text in environment().items() if name != "STRICT_ORDER"}
    run = _python("-c", "import torch; print(torch.accelerator.current_accelerator())", env=env)
    assert run.stdout.split() == ["None"], run.stderr


def _python(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)

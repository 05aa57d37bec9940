"""The Ray that a job starts: its own, silent, local, and gone afterwards."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spot_batch.service.embedded import _sweep_temp_folders

SCRIPT = """
import tempfile, sys
from spot_batch.service.embedded import embedded_ray
with embedded_ray(cpu_threads=1) as machine:
    import ray
    class Probe:
        def threads(self):
            import os
            return os.environ["OMP_NUM_THREADS"]
    probe = ray.remote(Probe).options(num_cpus=0).remote()
    print(ray.get(probe.threads.remote()), ray.nodes()[0]["NodeManagerAddress"], len(ray.nodes()))
    folder = machine.folder
    assert folder.is_dir()
assert not folder.exists()
"""


def run_script(prefix: list[str]) -> subprocess.CompletedProcess[str]:
    # A stale address and a home that cannot be written, not even by root.
    env = {**os.environ, "RAY_ADDRESS": "10.255.255.1:6379", "HOME": "/proc/self"}
    return subprocess.run(
        [*prefix, sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
        check=False,
    )


@pytest.mark.ray
def test_it_joins_nothing_says_nothing_and_leaves_nothing() -> None:
    done = run_script([])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 127.0.0.1 1\n"
    assert done.stderr == ""


@pytest.mark.ray
@pytest.mark.slow
def test_it_runs_beside_a_small_shared_memory_and_no_network() -> None:
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm && ip link set lo up && exec "
    apart = ["unshare", "--mount", "--net", "sh", "-c", small + '"$@"', "sh"]
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("unshare or ip is not here")
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("namespaces need privileges that this process lacks")
    done = run_script(apart)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 127.0.0.1 1\n"
    assert done.stderr == ""


def test_folders_of_killed_drivers_are_removed_and_those_in_use_are_not(tmp_path: Path) -> None:
    for name in ("spot-dead", "spot-used", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    with (tmp_path / "spot-used" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _sweep_temp_folders(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "spot-used"]

"""A filesystem that is really full: an error that says so, the last bundle whole, the run goes on."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# Within a user and mount namespace, so that no privilege is needed where the kernel allows these.
SMALL_DISK = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -c "$3" "$1" "$4"'

SCRIPT = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    import numpy as np
    from artifacts import Store, filesystem, open_run, save_bundle
    from artifacts.errors import NoSpace
    from artifacts.fsck import fsck
    from artifacts.gc import gc

    disk, leave = Path(sys.argv[1]), int(sys.argv[2])
    store = Store(disk / "store")

    def save(step):
        random = np.random.default_rng(step)
        tensors = {name: random.integers(0, 256, 40_000).astype(np.uint8) for name in "abc"}
        with open_run(store, "r") as run, store.using():
            name = save_bundle(store, tensors, {"step": step}, threads=1)
            run.record_bundle(step, name)
        return name

    first = save(1)
    real_free = filesystem.free_space
    free = real_free(disk)
    (disk / "filler").write_bytes(bytes(free - leave))
    try:
        save(2)
    except NoSpace as error:
        # With nothing free even the state of the run cannot be written.
        assert ("needed" in str(error) or leave == 0) and error.exit_code == 6
    else:
        raise AssertionError("the look before the save did not see the full disk")

    # Somebody else takes the space between the look and the write.
    filesystem.free_space = lambda path: 10**9
    try:
        save(2)
    except NoSpace as error:
        assert "no space left" in str(error) and error.exit_code == 6, error
    else:
        raise AssertionError("saved on a full disk")
    filesystem.free_space = real_free
    assert list(store.temporary_files()) == []
    report = fsck(store)
    assert (report.missing, report.corrupt) == ((), ())

    (disk / "filler").unlink()
    with open_run(store, "r") as run:
        assert run.last_bundle() == (1, first)
    second = save(2)
    with open_run(store, "r") as run:
        assert run.last_bundle() == (2, second)
    gc(store)
    report = fsck(store)
    assert (report.missing, report.corrupt, report.dangling, report.leftovers) == ((), (), (), ())
    """
)


@pytest.fixture(scope="module")
def small_disks():
    """Skips where no small filesystem can be made."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux namespaces")
    tried = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    if tried.returncode != 0:
        pytest.skip(f"no mount in a namespace: {tried.stderr.decode(errors='replace').strip()}")


@pytest.mark.parametrize("leave", [0, 20_000, 60_000, 110_000])
def test_a_full_disk(small_disks, tmp_path, leave):
    """`leave` bytes are free: none, not enough for the first tensor, the second, the third."""
    disk = tmp_path / "kleine Platte"
    disk.mkdir()
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", SMALL_DISK, "sh", str(disk), sys.executable, SCRIPT, str(leave)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr

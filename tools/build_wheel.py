"""Build the sdist and, from it, the wheel; with ``--check`` install that where no compiler is, and train.

The wheel is tagged manylinux if its native core needs no more of a system than that allows (`auditwheel show`).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Two ranks, one process each: a step of DDP with the gradients in 4 bits, in the native core of the wheel.
TRIAL = """
import os, sys
import torch, torch.distributed as dist, thinwire
from thinwire import kernels
from torch.nn.parallel import DistributedDataParallel
assert thinwire.__file__.startswith(sys.prefix), thinwire.__file__
assert kernels.HAVE_NATIVE, "the wheel has no native core"
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(256, 64))
wire = thinwire.compress(model, skip_if_slower=False)
model(torch.randn(8, 256)).square().mean().backward()
assert wire.stats.payload_sent_bytes > 0 and model.module.weight.grad.isfinite().all()
print("rank", sys.argv[2], wire.stats, "on", kernels.cpu_level())
dist.destroy_process_group()
"""


def run(*argv: str | Path, **options: object) -> str:
    done = subprocess.run([*map(str, argv)], text=True, capture_output=True, timeout=1800, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, argv))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def build(out: Path) -> tuple[Path, Path]:
    for old in out.glob("thinwire-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (sdist,), (wheel,) = out.glob("thinwire-*.tar.gz"), out.glob("thinwire-*.whl")
    return sdist, tagged(wheel)


def tagged(wheel: Path) -> Path:
    """The wheel under the oldest manylinux tag that holds for it; as it is where none does."""
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
    tag = re.search(r'tag:\s*"(manylinux_(?:\d+)_(?:\d+)_\w+)"', " ".join(shown.split()))
    if not tag:
        print(shown)
        return wheel
    name = run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag[1], wheel).split()[-1]
    return wheel.parent / name


def check(sdist: Path, wheel: Path) -> None:
    """What they hold; and that the wheel runs in an empty environment without a compiler on the path."""
    names = zipfile.ZipFile(wheel).namelist()
    cores = [name for name in names if name.startswith("thinwire/kernels/_native") and name.endswith(".so")]
    assert len(cores) == 1, cores
    assert "abi3" in cores[0], "one wheel is meant for every Python from 3.11 on"
    assert "-cp311-abi3-" in wheel.name, wheel.name
    assert {"thinwire/__init__.py", "thinwire_tools/cli.py", "thinwire_tools/doctor/report.html.j2"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "native", "benchmarks", "experiments", "tools"))]
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"native/kernels.cpp", "CMakeLists.txt", "LICENSE", "README.md", "src/thinwire/py.typed"} <= inside
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "env"
        run(sys.executable, "-m", "venv", "--without-pip", home)
        python = home / "bin" / "python"
        run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
        # PyTorch and the rest come from this environment, whose own thinwire stands behind the wheel's.
        (packages,) = home.glob("lib/python*/site-packages")
        (packages / "elsewhere.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        bare = {"PATH": folder, "HOME": folder, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        bare |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        print(run(home / "bin" / "thinwire", "--version", env=bare).strip())
        argv = [str(python), "-W", "error::RuntimeWarning", "-c", TRIAL, str(Path(folder) / "store")]
        ranks = [subprocess.Popen([*argv, str(rank)], env=bare, cwd=folder) for rank in range(2)]
        try:
            assert [rank.wait(timeout=300) for rank in ranks] == [0, 0], "a training with the wheel failed"
        finally:
            for rank in ranks:
                rank.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--check", action="store_true", help="install the wheel where no compiler is, and train")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sdist, wheel = build(options.out)
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB, {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    if options.check:
        check(sdist, wheel)


if __name__ == "__main__":
    main()

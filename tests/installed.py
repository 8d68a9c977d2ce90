"""Try what would be published, as somebody who installs it: `make dist` calls this with its folder.

The wheel, and the source where no compiler is found, are each installed into an empty environment.
It has the packages that allranks declares, as links to those of this environment, and no others: an
import of something that is not declared fails. The commands run in an empty folder.
"""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

EXTRA = "digits"
EXTENSIONS = ["_codecs", "_collectives", "_norms"]
SOURCES = re.compile(r"\.(?:c|h|inc)$")
SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in torch.utils.data.DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
"""


def main(folder: Path) -> None:
    """Look into the two files, install each, and run the commands of each."""
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    in_wheel = zipfile.ZipFile(wheel).namelist()
    in_source = ["/".join(Path(n).parts[1:]) for n in tarfile.open(source).getnames()]
    tracked = [str(path) for path in Path("src").rglob("*") if path.is_file() and is_source(path)]
    lost = [name for name in tracked if name not in in_source]
    assert not lost, f"not in {source}: {lost}"
    wanted = {name.removeprefix("src/") for name in tracked if not SOURCES.search(name)}
    lost = wanted - {*in_wheel}
    assert not lost, f"not in {wheel}: {lost}"
    strange = [n for n in in_wheel if not n.startswith("allranks") or SOURCES.search(n)]
    assert not strange, f"in {wheel}: {strange}"
    assert not [name for name in in_source if name.startswith("tests")], "tests without the rest"

    about = next(name for name in in_wheel if name.endswith(".dist-info/METADATA"))
    parsed = email.message_from_bytes(zipfile.ZipFile(wheel).read(about))
    declared = parsed.get_all("Requires-Dist", [])
    with tempfile.TemporaryDirectory() as temporary:
        compiled = Installed(Path(temporary, "compiled"), wheel, declared)
        plain = Installed(Path(temporary, "plain"), source, declared, CC="/no/compiler")
        print("extensions:", compiled.extensions(), plain.extensions(), flush=True)
        assert sorted(compiled.extensions()) == EXTENSIONS and not plain.extensions()
        trained = [each.run("train digits --ranks 2 --bitwise") for each in (compiled, plain)]
        digests = {re.findall("sha256 ([0-9a-f]{64})", printed)[0] for printed in trained}
        assert len(digests) == 1, trained
        printed = compiled.run("check digits --ranks 2")
        assert "equal: digits" in printed, printed
        printed = compiled.run("check --ranks 2 -- python train.py", code=5)
        assert "same-samples-on-ranks" in printed, printed


def is_source(path: Path) -> bool:
    """Whether a file of src/ is written by a person; a checkout need not be a repository."""
    made = ("__pycache__", ".egg-info")
    return not (path.suffix == ".so" or any(part.endswith(made) for part in path.parts))


class Installed:
    """An environment with allranks from `file` and what it declares, and a folder to work in."""

    def __init__(self, at: Path, file: Path, declared: list[str], **variables: str) -> None:
        venv.create(at, symlinks=True)
        (self.packages,) = at.glob("lib/*/site-packages")
        self.python = at / "bin" / "python"
        self.folder = at / "work"
        self.folder.mkdir()
        (self.folder / "train.py").write_text(SCRIPT)
        link(["setuptools", *declared], self.packages)
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        command = [*pip, "--no-index", "--no-build-isolation", f"{file.resolve()}[{EXTRA}]"]
        subprocess.run(command, env={**os.environ, **variables}, check=True)

    def extensions(self) -> list[str]:
        """The names of those that a compiler made."""
        return [path.name.partition(".")[0] for path in self.packages.glob("allranks/**/*.so")]

    def run(self, words: str, code: int = 0) -> str:
        """What `allranks WORDS` printed; it must leave with `code`."""
        began = time.monotonic()
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [str(self.python.parent / "allranks"), *words.split()],
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout}"
        print(f"allranks {words}: {time.monotonic() - began:.0f} s", flush=True)
        return done.stdout


def link(declared: list[str], packages: Path) -> None:
    """Link each declared package, and all that it needs, into an environment."""
    ahead = [(text, EXTRA) for text in declared]
    seen = set()
    while ahead:
        text, extra = ahead.pop()
        needed = Requirement(text)
        is_asked_for = needed.marker is None or needed.marker.evaluate({"extra": extra})
        if (text, extra) in seen or not is_asked_for:
            continue
        seen.add((text, extra))
        found = importlib.metadata.distribution(needed.name)
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(found.locate_file(name))
        ahead += [(t, e) for t in found.requires or () for e in ("", *needed.extras)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

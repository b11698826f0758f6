"""Corpora by URI are those of their local copies: formats, names and order, batches, states; and what is refused."""

import pickle
import random
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import CountingCorpus
from range_server import RangeServer, Request
from table_files import list_array, table_of, write_parquet
from test_samples import CASES

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes import open_corpus as open_any_corpus
from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.discovery.find_files import find_files
from dali_pipes.errors import BackendError, ConfigError, CorpusError, CorpusFormatError, CorpusReadError, DaliPipesError
from dali_pipes.storage import stores
from dali_pipes.storage.retries import ReadRetries
from dali_pipes.uris import Uri

pytestmark = pytest.mark.needs("obstore")

OF_SHARDS: list[tuple[list[str], str | None]] = [
    (["mds/tokens_u16"], None),
    (["mds/concat_bytes_i64"], "int64"),
    (["mds/tokens_br"], None),
    (["mds/tokens_snappy"], None),
    (["litdata/gpt2_numpy_u16"], None),
    (["litdata/gpt2_torch_i32/index.json"], None),
]
SAMPLES = [*((names, dtype) for names, _, _, dtype, *_ in CASES), *OF_SHARDS]
SETTINGS: dict[str, Any] = {"batch_size": 4, "seq_len": 64, "device": "cpu", "seed": 3}


@pytest.fixture(scope="module")
def server(samples: Path) -> Iterator[RangeServer]:
    with RangeServer.of_folder(samples) as server:
        yield server


@pytest.fixture
def memory(samples: Path) -> Iterator[Any]:
    """The store of `memory://`, emptied after the test."""
    store = stores.memory_store()
    yield store
    for some in store.list():
        for one in some:
            store.delete(one["path"])


def put(store: Any, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        store.put(name, content)


@pytest.mark.parametrize("retries", [0, 8], ids=["calm", "faults"])
@pytest.mark.parametrize(("names", "dtype"), SAMPLES, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_every_format_reads_as_its_copy(
    server: RangeServer, samples: Path, names: list[str], dtype: str | None, retries: int
) -> None:
    chance = random.Random(1)
    faults = ["503", "429", "short", "whole", "reset"]
    server.fault = lambda request: chance.choice(faults) if retries and chance.random() < 0.2 else None
    paths: Any = {"dtype": dtype, "read_retries": retries}
    with (
        open_corpus([samples / name for name in names], dtype=dtype) as local,
        open_corpus([f"{server.url}/{name}" for name in names], **paths) as remote,
    ):
        facts = [
            (c.fingerprint, c.format, c.dtype, c.num_tokens, c.num_documents, c.file_digests) for c in (local, remote)
        ]
        assert facts[0] == facts[1]
        assert [file.name for file in remote.files] == [file.name for file in local.files]
        assert np.array_equal(remote.tokens(0, remote.num_tokens), local.tokens(0, local.num_tokens))
        assert (remote.document_offsets is None) == (local.document_offsets is None)
        if remote.document_offsets is not None and local.document_offsets is not None:
            assert np.array_equal(remote.document_offsets, local.document_offsets)
        middle = local.num_tokens // 2
        assert remote.locate(middle).offset == local.locate(middle).offset


@pytest.mark.parametrize("name", ["datatrove/gpt2", "mds/tokens_u16", "megatron/gpt2_text_document", "hf/tokens"])
def test_folders_and_prefixes_of_a_store(samples: Path, memory: Any, name: str) -> None:
    put(memory, {f"data/{p.relative_to(samples)}": p.read_bytes() for p in samples.rglob("*") if p.is_file()})
    with open_corpus(samples / name) as local, open_corpus(f"memory://bucket/data/{name}") as remote:
        assert remote.fingerprint == local.fingerprint
        assert np.array_equal(remote.tokens(0, remote.num_tokens), local.tokens(0, local.num_tokens))
        assert remote.document_offsets is not None
        assert local.document_offsets is not None
        assert np.array_equal(remote.document_offsets, local.document_offsets)


NAMES = [
    "s_10.bin",
    "s_2.bin",
    "s_1.bin",
    "below/s_3.bin",
    "below/deep/s_4.bin",
    ".hidden/s_5.bin",
    "README.md",
    "x.bin.tmp2/a.bin",
    "other.npy",
]


@pytest.mark.parametrize(
    "pattern", ["*.bin", "s_?.bin", "s_[12].bin", "**/*.bin", "**", "below/**/*.bin", "*/*.bin", "**/s_*"]
)
def test_patterns_match_as_those_of_files(tmp_path: Path, memory: Any, pattern: str) -> None:
    for name in NAMES:
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_bytes(b"abcd")
    put(memory, {f"d/{name}": b"abcd" for name in NAMES})
    local = [str(file.relative_to(tmp_path)) for file in map(Path, find_files(str(tmp_path / "d" / pattern)))]
    assert [Uri(str(file)).path for file in find_files(f"memory://x/d/{pattern}")] == local


def test_a_listing_answers_for_the_files_next_to_its_own(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, indexes and manifests of objects that a listing does not have are not asked for."""
    names = ["d/a.bin", "d/b/c.bin", "d/b/e/f.bin", "d/g.bin", "top.bin"]
    put(memory, dict.fromkeys(names, b"abcd"))
    monkeypatch.setattr(stores, "look_up", lambda uri: pytest.fail(f"{uri} was asked for"))
    for folder, count in (("x/d/", 2), ("x/d/b", 1), ("x/**/*.bin", 5), ("x", 1), ("x/d/*/*.bin", 1)):
        if folder in ("x/d/b",):
            monkeypatch.setattr(stores, "look_up", lambda uri: None)
        with open_corpus(f"memory://{folder}") as corpus:
            assert len(corpus.files) == count, folder
        monkeypatch.setattr(stores, "look_up", lambda uri: pytest.fail(f"{uri} was asked for"))


def test_training_and_validation_are_not_mixed(memory: Any) -> None:
    put(memory, {"d/train_1.bin": b"abcd", "d/val_1.bin": b"abcd"})
    with pytest.raises(CorpusError) as raised:
        find_files("memory://x/d")
    assert "'memory://x/d/train_1.bin'" in str(raised.value)
    assert "memory://x/d/val_1.bin" in str(raised.value)


def test_masks_and_manifests_are_found_next_to_objects(tmp_path: Path, memory: Any) -> None:
    ids = np.arange(1000, dtype=np.uint16)
    mask = (ids % 3 > 0).astype(np.uint8)
    put(memory, {"d/a.bin": ids.tobytes(), "d/a.bin.loss": mask.tobytes()})
    with open_corpus("memory://x/d") as corpus:
        assert corpus.loss_mask is not None
        out = np.zeros(1000, np.uint8)
        corpus.loss_mask.read_pieces(np.zeros(1, np.int64), np.array([1000]), np.zeros(1, np.int64), out)
        assert np.array_equal(out, mask)
    put(memory, {"d/manifest.json": b'{"files": [{"name": "a.bin", "sha256": "0"}, {"name": "a.idx", "sha256": "0"}]}'})
    with pytest.raises(CorpusFormatError, match=r"memory://x/d/a\.idx: is missing"):
        open_corpus("memory://x/d")


def batches_of(loader: TokenLoader) -> list[list[list[int]]]:
    return [batch["input_ids"].tolist() for batch in loader]


@pytest.fixture
def faulty(counting: Callable[..., CountingCorpus]) -> Iterator[tuple[CountingCorpus, RangeServer, list[str]]]:
    """A corpus of three files, a server of them with a fault in every fourth answer, and their addresses."""
    corpus = counting(9000, 5000, 7001, dtype="uint16")
    chance, lock = random.Random(0), threading.Lock()
    faults = ["503", "429", "short", "whole", "reset"]

    def fault(request: Request) -> str | None:
        with lock:
            return chance.choice(faults) if chance.random() < 0.25 else None

    with RangeServer.of_folder(corpus.folder) as server:
        server.fault = fault
        yield corpus, server, [f"{server.url}/{path.name}" for path in corpus.files]


def test_a_loader_over_faults_gives_the_batches_of_the_copy(
    faulty: tuple[CountingCorpus, RangeServer, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, server, addresses = faulty
    monkeypatch.setattr(stores, "STALL_S", 0.2)
    often = server.fault
    server.fault = lambda request: "stall" if request.number in (9, 30, 51) else often(request)
    local = TokenLoader(corpus.pattern, **SETTINGS)
    remote = TokenLoader(addresses, **SETTINGS, read_retries=20, batches_per_run=2)
    with local, remote:
        assert batches_of(remote) == batches_of(local)
        assert batches_of(remote) == batches_of(local), "the second epoch"
        assert remote.stats().read_retries > 0


@pytest.mark.parametrize("turns", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_resumes_over_faults_continue_where_they_were(
    faulty: tuple[CountingCorpus, RangeServer, list[str]], turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States move from one storage to the other, at random steps."""
    corpus, server, addresses = faulty
    monkeypatch.setattr(stores, "STALL_S", 0.2)
    often = server.fault
    server.fault = lambda request: "stall" if request.number % 100 == 50 else often(request)
    with TokenLoader(corpus.pattern, **SETTINGS) as loader:
        whole = batches_of(loader)
    with TokenLoader(corpus.pattern, **SETTINGS) as loader:
        next(iter(loader))
        first = loader.state_dict()
    chance, was_remote = random.Random(5), False
    state, step = first, 1
    for turn in range(turns):
        was_remote = not was_remote
        paths: Any = addresses if was_remote else corpus.pattern
        with TokenLoader(paths, **SETTINGS, read_retries=20) as loader:
            loader.load_state_dict(state)
            if step > len(whole) - 10:
                state, step = first, 1
                loader.load_state_dict(first)
            last = step + chance.randrange(1, 9)
            batches = iter(loader)
            for at in range(step, last):
                assert next(batches)["input_ids"].tolist() == whole[at], f"turn {turn}, step {at}"
            state, step = loader.state_dict(), last


def test_the_trainers_thread_asks_nothing(
    faulty: tuple[CountingCorpus, RangeServer, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, server, addresses = faulty
    server.fault = lambda request: None
    asked: set[threading.Thread] = set()

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def asks(*arguments: Any, **options: Any) -> Any:
            asked.add(threading.current_thread())
            return call(*arguments, **options)

        return asks

    monkeypatch.setattr(stores, "get", noted(stores.get))
    monkeypatch.setattr(stores, "look_up", noted(stores.look_up))
    with TokenLoader(addresses, **SETTINGS, batches_per_run=1) as loader:
        asked.clear()
        assert len(batches_of(loader)) > 50
        assert len(batches_of(loader)) > 50
        loader.state_dict()
    assert asked
    assert threading.current_thread() not in asked


def test_a_replaced_object_stops_the_run(faulty: tuple[CountingCorpus, RangeServer, list[str]]) -> None:
    _, server, addresses = faulty
    server.fault = lambda request: None
    with TokenLoader(addresses, **SETTINGS, batches_per_run=1) as loader:
        batches = iter(loader)
        next(batches)
        name = addresses[0].rpartition("/")[2]
        server.files[name] = server.files[name][:-2] + b"xx"
        with pytest.raises(CorpusReadError, match=rf"{name}: was replaced or modified"):
            list(batches)


def test_a_mixture_of_both(faulty: tuple[CountingCorpus, RangeServer, list[str]]) -> None:
    corpus, _, addresses = faulty
    both: list[dict[str, Any]] = [
        {
            "total_tokens": 64 * 200,
            "mixture": {
                "far": {"corpus": [far], "weight": 0.7},
                "near": {"corpus": [str(corpus.files[1])], "weight": 0.3},
            },
        }
        for far in (str(corpus.files[0]), addresses[0])
    ]
    local, remote = both
    with TokenLoader(**local, **SETTINGS) as one, TokenLoader(**remote, **SETTINGS, read_retries=20) as other:
        assert batches_of(other) == batches_of(one)
        assert other.state_dict()["corpus"] == one.state_dict()["corpus"]
        state = other.state_dict()
    same: Any = {name: {"corpus": addresses[:1], "weight": 0.5} for name in ("far", "near")}
    with pytest.raises(ConfigError, match=r"far.*near"):
        LoaderConfig(mixture=same, total_tokens=6400, **SETTINGS)
    with TokenLoader(**local, **SETTINGS) as one:
        one.load_state_dict(state)


def test_sources_are_opened_at_the_same_time(counting: Callable[..., CountingCorpus]) -> None:
    """The first answer for each source waits until all sources have asked."""
    corpus = counting(*range(3000, 3006), dtype="uint16")
    with RangeServer.of_folder(corpus.folder) as server:
        all_asked, seen, lock = threading.Barrier(6, timeout=60), set[str](), threading.Lock()

        def fault(request: Request) -> str | None:
            with lock:
                is_first = request.path in server.files and request.path not in seen
                seen.add(request.path)
            if is_first:
                all_asked.wait()
            return None

        server.fault = fault
        near, far = (
            {f"s{n}": {"corpus": where(path), "weight": n + 1} for n, path in enumerate(corpus.files)}
            for where in (str, lambda path: f"{server.url}/{path.name}")
        )
        settings: dict[str, Any] = {**SETTINGS, "total_tokens": 64 * 200}
        with TokenLoader(mixture=near, **settings) as local, TokenLoader(mixture=far, **settings) as remote:
            assert not all_asked.broken
            assert batches_of(remote) == batches_of(local)
        server.fault = lambda request: None
        for name in ("s4", "s2"):
            far[name] = {**far[name], "corpus": f"{server.url}/none_{name}.bin"}
        with pytest.raises(CorpusReadError, match=r"^mixture\.s2: .*none_s2"):
            TokenLoader(mixture=far, **settings)


SECRETS = ["hunter2", "5f2c9a", "s3cr3t"]


def test_credentials_are_in_no_output(
    faulty: tuple[CountingCorpus, RangeServer, list[str]],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    _, server, _ = faulty
    server.fault = lambda request: None
    address = f"{server.url.replace('//', '//me:hunter2@')}/shard_000.bin?X-Amz-Signature=5f2c9a&token=s3cr3t"
    shown: list[object] = []

    def show(error: BaseException) -> None:
        shown.extend([str(error), repr(error), "".join(traceback.format_exception(error)), repr(error.__context__)])

    config = LoaderConfig(corpus=address, read_retries=1, **SETTINGS)
    assert config.replace(seed=4).corpus == config.corpus
    shown += [config, repr(config), config.to_toml(), config.model_dump(mode="json"), config.order_settings()]
    with TokenLoader(config) as loader:
        batches = iter(loader)
        next(batches)
        assert any(request.authorization for request in server.requests), "they are used"
        shown += [loader, repr(loader), loader.state_dict(), loader.stats(), loader.locate(0, 0)]
        for answers in (["403"] * 9, ["503"] * 9, ["reset"] * 9):
            server.fault = lambda request, left=answers: left.pop()  # type: ignore[misc]
            with pytest.raises(CorpusReadError) as raised:
                open_corpus(address, read_retries=0)
            show(raised.value)
        server.fault = lambda request: None
    with open_corpus(address) as corpus:
        shown += [corpus, corpus.files, corpus.locate(5), corpus.notes]
        server.fault = lambda request: "403"
        with pytest.raises(CorpusReadError) as raised:
            corpus.tokens(0, 100)
        show(raised.value)
    for broken in (f"{address}/../x", address.replace("http", "htp"), address.replace("shard_000", "nope")):
        with pytest.raises(DaliPipesError) as refused:
            open_corpus([broken, broken])
        show(refused.value)
    text = "\n".join([*map(repr, shown), *map(str, shown), *capfd.readouterr(), caplog.text])
    assert "shard_000.bin" in text
    assert not [secret for secret in SECRETS if secret in text]
    # What is saved says that something is missing.
    (tmp_path / "c.toml").write_text(config.to_toml())
    with pytest.raises(ConfigError, match="credentials are not saved"):
        LoaderConfig.from_file(tmp_path / "c.toml")
    assert pickle.loads(pickle.dumps(Uri(address))).full == address


BAD: list[tuple[Any, type[Exception], list[str]]] = [
    ("s4://bucket/a.bin", ConfigError, ["s4", "s3"]),
    ("htps://host/a.bin", ConfigError, ["https"]),
    (Path("s3://bucket/a.bin"), ConfigError, ["'s3://bucket/a.bin'"]),
    ("memory://bucket/nothing", CorpusReadError, ["memory://bucket/nothing", "no such"]),
    ("memory://bucket/nothing/*.bin", CorpusReadError, ["no file matches"]),
    ("hf://datasets/a", ConfigError, ["hf://datasets/ORGANIZATION/NAME"]),
    ("az://container/a.bin", ConfigError, ["AZURE_STORAGE_ACCOUNT_NAME"]),
    ("http://:99999/a.bin", ConfigError, ["host"]),
    ("URL/*.bin", CorpusReadError, ["list"]),
    ("URL/nanogpt", CorpusReadError, ["list"]),
    ("URL/nanogpt/nope.bin", CorpusReadError, ["nope.bin", "no such file"]),
    ("URL/arrayrecord/gpt2_u16.arrayrecord", CorpusFormatError, ["array_record", "copy"]),
    (["URL/nanogpt/train.bin", "URL/nanogpt/train.bin"], CorpusError, ["listed twice"]),
]


@pytest.mark.parametrize(("paths", "kind", "said"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_one_sentence(
    server: RangeServer, paths: Any, kind: type[Exception], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    server.fault = lambda request: None
    if isinstance(paths, str | list):
        paths = [path.replace("URL", server.url) for path in ([paths] if isinstance(paths, str) else paths)]
    with pytest.raises(kind) as raised:
        open_corpus(paths)
    message = str(raised.value)
    assert all(part in message for part in said), message
    assert message.count("\n") == 0


def test_text_is_not_tokenized_from_afar(server: RangeServer) -> None:
    server.fault, server.files["a.txt"] = (lambda request: None), b"some text\n" * 100
    with pytest.raises(CorpusFormatError, match="text"):
        open_any_corpus(f"{server.url}/a.txt", tokenizer="tokenizer.json")


@pytest.mark.parametrize("fault", ["page", "403", "401", "expired"])
def test_answers_of_others_are_named(server: RangeServer, fault: str) -> None:
    server.fault = lambda request: fault if request.method == "GET" else None
    with pytest.raises(CorpusReadError) as raised:
        open_corpus(f"{server.url}/nanogpt/train.bin", read_retries=1)
    said = {"page": "proxy", "403": "denied (403", "401": "denied (401", "expired": "credentials have expired"}
    assert said[fault] in str(raised.value)


def test_a_page_for_a_file_is_named(server: RangeServer) -> None:
    server.fault, server.files["page.bin"] = (lambda request: None), b"<!DOCTYPE html><html><body>Sign in" + b" " * 99
    with pytest.raises(CorpusFormatError, match="an HTML page"):
        open_corpus(f"{server.url}/page.bin")


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(BackendError, match=r'pip install "dali-pipes\[remote\]"'):
        open_corpus("memory://x/a.bin")


def test_retries_are_those_of_the_corpus(server: RangeServer) -> None:
    server.fault = lambda request: "503"
    retries = ReadRetries(3)
    with retries.in_use(), pytest.raises(CorpusReadError, match="503"):
        find_files(f"{server.url}/nanogpt/train.bin")
    assert retries.count == 3


def test_a_row_group_is_one_request(tmp_path: Path) -> None:
    """Of its column of ids alone, once the footer is known; a replaced file is noticed nevertheless."""
    table = table_of([list_array([[row] * 100 for row in range(4000)])])
    write_parquet(tmp_path / "a.parquet", table, row_group_size=500)
    with RangeServer.of_folder(tmp_path) as server, open_corpus(f"{server.url}/a.parquet") as corpus:
        server.requests = []
        assert corpus.tokens(0, corpus.num_tokens).tolist() == np.repeat(np.arange(4000), 100).tolist()
        assert len(server.requests) == 8
        server.files["a.parquet"] = server.files["a.parquet"][:-1] + b"x"
        corpus._chunks.clear()
        with pytest.raises(CorpusReadError, match=r"a\.parquet: was replaced or modified"):
            corpus.tokens(0, 10)

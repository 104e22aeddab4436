"""Passages from a local file and from an HTTP server, and faults of the server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clients.config.tables.environment import SearchConfig
from protos.errors import InvalidInput, Unavailable
from protos.rpc import web_client
from student_trainer.environments.remote_retriever import RemoteRetriever
from student_trainer.environments.retriever import LocalRetriever, format_passages, make_retriever
from tests.student_trainer import tiny
from tests.student_trainer.environments.server import Library, serve, serve_drips

CORPUS = [
    "Paris\nThe capital of France, on the Seine.",
    "Rome\nThe capital of Italy, on the Tiber.",
    "Seine\nA river in France.",
    "Zebra\nAn animal with stripes.",
]


@pytest.fixture(params=["jsonl", "parquet"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / f"corpus.{request.param}"
    if request.param == "jsonl":
        path.write_text("".join(json.dumps({"id": "x", "contents": c}) + "\n" for c in CORPUS))
    else:
        pq.write_table(pa.table({"id": ["x"] * len(CORPUS), "contents": CORPUS}), path)
    return str(path)


def test_words_find_their_passages(corpus: str) -> None:
    passages = LocalRetriever(corpus).passages(
        ["river France", "STRIPES?", "nothing like it", ""], 3
    )
    assert passages[0] is not None
    assert passages[0][0] == CORPUS[2]
    assert set(passages[0]) == {CORPUS[2], CORPUS[0]}
    assert passages[1:] == [[CORPUS[3]], [], []]
    assert LocalRetriever(corpus).passages(["capital"], 1)[0] in ([CORPUS[0]], [CORPUS[1]])


def test_passages_are_written_as_in_search_r1() -> None:
    text = format_passages(CORPUS[:2])
    assert text == (
        "Doc 1(Title: Paris) The capital of France, on the Seine.\n"
        "Doc 2(Title: Rome) The capital of Italy, on the Tiber."
    )
    assert format_passages([]) == ""
    assert format_passages(["only a title"]) == "Doc 1(Title: only a title)"


@pytest.mark.parametrize(
    ("records", "message"), [('{"text": "a"}\n', "no column 'contents'"), ("", "has no passages")]
)
def test_a_file_that_is_no_corpus_is_refused(tmp_path: Path, records: str, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    with pytest.raises(InvalidInput, match="no such file"):
        LocalRetriever(str(path))
    path.write_text(records)
    with pytest.raises(InvalidInput, match=message) as raised:
        LocalRetriever(str(path))
    assert raised.value.field == "environment.retriever"


@pytest.mark.parametrize("retriever", ["corpus.txt", "localhost:8000/retrieve"])
def test_neither_a_file_nor_an_address_is_refused(retriever: str) -> None:
    with pytest.raises(ValueError, match=r"must be a file of passages \(\.jsonl"):
        SearchConfig(retriever=retriever)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    monkeypatch.setattr(web_client, "FIRST_PAUSE_SECONDS", 0.001)
    library = Library({"france": CORPUS[:3], "zebra": CORPUS[3:]})
    with serve(library) as url:
        library.url = url
        yield library


def test_a_server_is_asked_as_search_r1_asks(library: Library) -> None:
    retriever = make_retriever(SearchConfig(retriever=library.url))
    assert retriever.passages(["zebra", "france", "?"], 2) == [CORPUS[3:], CORPUS[:2], []]
    question = {"queries": ["zebra", "france", "?"], "topk": 2, "return_scores": True}
    assert library.questions[-1] == question


@pytest.mark.parametrize(
    "faults",
    [
        *([503], [500, 502, 429], [b"<html>"], [b'{"result": [[{"text": "?"}]]}'], [b"[]"]),
        [b"[" * 100_000],
    ],
    ids=["503", "three", "html", "shape", "list", "depth"],
)
def test_a_fault_that_passes_is_not_noticed(library: Library, faults: list[int | bytes]) -> None:
    retriever = RemoteRetriever(library.url, timeout_seconds=5)
    library.faults = list(faults)
    assert retriever.passages(["zebra"], 3) == [CORPUS[3:]]


def test_passages_of_a_server_are_read_as_those_of_a_file(library: Library, tmp_path: Path) -> None:
    """Half of a character ends no job, which would leave the other ranks waiting; 33.0 is "33"."""
    contents: list[object] = ["half \ud83d of a zebra", "a whole zebra \U0001f993", 33.0]
    library.texts = {"zebra": contents}  # type: ignore[dict-item]
    expected = ["half ? of a zebra", "a whole zebra \U0001f993", "33"]
    [passages] = RemoteRetriever(library.url, timeout_seconds=5).passages(["zebra"], 3)
    assert passages == expected
    words = format_passages(passages)
    assert tiny.tokenizer()(words)["input_ids"]
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"contents": entry}) + "\n" for entry in contents))
    [passages] = LocalRetriever(str(file)).passages(["zebra 33"], 3)
    assert passages is not None
    assert sorted(passages) == sorted(expected)


@pytest.mark.parametrize("contents", [None, True, ["a"], {"a": 1}, float("nan")])
def test_a_passage_that_is_no_text_fails_its_query(library: Library, contents: object) -> None:
    library.texts = {"zebra": [contents], "france": CORPUS[:1]}  # type: ignore[dict-item,list-item]
    retriever = RemoteRetriever(library.url, timeout_seconds=5)
    assert retriever.passages(["zebra", "france"], 3) == [None, CORPUS[:1]]


def test_one_query_that_breaks_the_server_fails_alone(library: Library) -> None:
    retriever = RemoteRetriever(library.url, timeout_seconds=5)
    before = len(library.questions)
    assert retriever.passages(["zebra", "poison", "?"], 3) == [CORPUS[3:], None, []]
    assert len(library.questions) - before == 4 + 3  # together, four times; then each alone


def test_a_server_that_is_gone_is_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_client, "FIRST_PAUSE_SECONDS", 0.001)
    with serve(Library({})) as url:
        retriever = RemoteRetriever(url, timeout_seconds=5)
    assert retriever.passages(["a", "b"], 3) == [None, None]


@pytest.mark.parametrize("path", ["", "/wrong"])
def test_what_is_no_retriever_is_refused_at_once(library: Library, path: str) -> None:
    url = library.url.removesuffix("/retrieve") + path
    if not path:
        with socket.create_server(("127.0.0.1", 0)) as free:
            url = f"http://127.0.0.1:{free.getsockname()[1]}/retrieve"
    with pytest.raises(Unavailable, match="no retriever answers at") as raised:
        RemoteRetriever(url, timeout_seconds=5)
    assert raised.value.field == "environment.retriever"
    assert raised.value.hint is not None


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_client, "FIRST_PAUSE_SECONDS", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepted by the kernel, never answered
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/retrieve"
        with pytest.raises(Unavailable, match="timed out"):
            RemoteRetriever(url, timeout_seconds=0.05)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("text", [HEAD + b"Length: ", HEAD + b"\r\n{"], ids=["headers", "body"])
def test_a_server_that_drips_bytes_is_given_up(
    monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    """Each byte arrives in time, but the answer never ends: only a deadline ends the request."""
    monkeypatch.setattr(web_client, "FIRST_PAUSE_SECONDS", 0.001)
    with (
        serve_drips(text) as url,
        pytest.raises(Unavailable, match=r"no complete answer within 0\.2 s"),
    ):
        RemoteRetriever(f"{url}/retrieve", timeout_seconds=0.2)


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "2852039166",  # the same
        "0xa9fea9fe:80",  # likewise
        "[::ffff:169.254.169.254]",
        "[fe80::1]:8000",
        "[fd00:ec2::254]",
        "[fd20:ce::254]",
        "100.100.100.200",
    ],
)
def test_where_clouds_keep_credentials_nobody_is_asked(host: str) -> None:
    with pytest.raises(InvalidInput, match="where clouds keep credentials") as raised:
        RemoteRetriever(f"http://{host}/retrieve", timeout_seconds=5)
    assert raised.value.field == "environment.retriever"


@pytest.mark.parametrize(
    "place", ["127.0.0.1:port", "127.0.0.1:80800", "a..b:80", "a" * 64 + ".com", "", "user@"]
)
def test_what_is_no_address_is_refused(place: str) -> None:
    with pytest.raises(InvalidInput, match="is not a valid address"):
        RemoteRetriever(f"http://{place}/retrieve", timeout_seconds=5)


def test_no_redirect_is_followed(library: Library) -> None:
    """A redirect could lead to any address."""
    redirect = b"HTTP/1.1 307 Moved\r\nContent-Length: 0\r\nLocation: " + library.url.encode()
    with (
        serve_drips(redirect + b"\r\n\r\n") as url,
        pytest.raises(Unavailable, match="answered 307"),
    ):
        RemoteRetriever(f"{url}/retrieve", timeout_seconds=5)
    assert not library.questions

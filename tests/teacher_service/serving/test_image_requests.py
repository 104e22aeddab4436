"""Requests with images: over the wire, in the cache, and refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from clients.teacher.client import TeacherClient
from clients.teacher.query import ScoreQuery, request_of, requests_of
from protos import teacher_pb2
from protos.errors import InvalidInput
from protos.rpc.transport import MAX_MESSAGE_BYTES
from teacher_service.serving.validation import RequestLimits, parse_request
from tests import tiny_vision
from tests.teacher_service.processes import TeacherProcess

WORDS = tiny_vision.tokenizer()
PLACEHOLDER = WORDS.convert_tokens_to_ids(tiny_vision.IMAGE)
LIMITS = RequestLimits(len(WORDS), 100, 8, placeholder=PLACEHOLDER)
ONE = tiny_vision.START + tiny_vision.IMAGE + tiny_vision.END


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeacherProcess]:
    root = tmp_path_factory.mktemp("teacher")
    model = tiny_vision.save(root / "model", "qwen3_vl")
    cache = ("--cache-dir", str(root / "cache"))
    process = TeacherProcess(("--model", str(model), *cache), log=root / "teacher.log")
    yield process
    process.close()


@pytest.fixture
def client(teacher: TeacherProcess) -> Iterator[TeacherClient]:
    with TeacherClient(teacher.address) as teacher_client:
        yield teacher_client


def query(prompt: str, answer: str, *images: bytes, **options: Any) -> ScoreQuery:
    before = WORDS(prompt, add_special_tokens=False)["input_ids"]
    after = WORDS(answer, add_special_tokens=False)["input_ids"]
    tokens = np.array(before + after, np.int32)
    chosen = {"top_k": 5, "f32": True} | options
    return ScoreQuery(tokens, len(before), **chosen, images=images)


def large_image() -> bytes:
    """Of 6 MB: more than a message holds."""
    file = tiny_vision.image(3, 1600, 1250)
    assert len(file) > 1.4 * MAX_MESSAGE_BYTES
    return file


def test_rows_over_the_wire_are_those_of_a_plain_forward_pass(client: TeacherClient) -> None:
    assert client.info().takes_images
    model = tiny_vision.model("qwen3_vl")
    large = large_image()
    for images in ([tiny_vision.image(0)], [large, tiny_vision.image(1)]):
        image_query = query(ONE * len(images) + "1+2=", "345", *images)
        block = client.submit(image_query).result(60)
        logits = tiny_vision.plain_logits(model, image_query.token_ids.tolist(), images)
        expected = logits.log_softmax(-1)[-1 - image_query.rows : -1].numpy()
        at_token = expected[np.arange(image_query.rows), image_query.token_ids[image_query.start :]]
        np.testing.assert_allclose(block.token_logprobs, at_token, atol=1e-5)


def test_the_cache_knows_an_image_by_its_bytes(client: TeacherClient) -> None:
    image = tiny_vision.image(4)
    first = client.score([query(f"{ONE}7=", "8", image)])[0]
    scored = client.load().scored_tokens
    again = client.score([query(f"{ONE}7=", "8", bytes(bytearray(image)))])[0]
    assert client.load().scored_tokens == scored
    np.testing.assert_array_equal(first.token_logprobs, again.token_logprobs)
    other_rows = client.score([query(f"{ONE}7=", "8", tiny_vision.image(5))])[0]
    assert client.load().scored_tokens == scored + 1
    assert first.token_logprobs != other_rows.token_logprobs


@pytest.mark.parametrize(
    ("image_query", "message"),
    [
        (query(f"{ONE}1=", "2"), "1 image placeholders .* has 0 images"),
        (query(f"{ONE}1=", "2", *[tiny_vision.image()] * 2), "1 image .* has 2 images"),
        (query(f"{ONE}{ONE}1=", "2", tiny_vision.image()), "2 image .* has 1 images"),
        (query("1=", "2", tiny_vision.image()), "0 image .* has 1 images"),
        (query(tiny_vision.IMAGE * 2 + "1=", "2", *[tiny_vision.image()] * 2), "in a row"),
        (query(f"{ONE}1=", "2" + tiny_vision.IMAGE, tiny_vision.image()), "at or after `start`"),
        (query(f"{ONE}1=", "2", b"no image"), "not PNG, JPEG or WebP"),
    ],
)
def test_wrong_images_are_refused(
    client: TeacherClient, image_query: ScoreQuery, message: str
) -> None:
    """Each fails alone, in one sentence: the stream goes on."""
    good = query(f"{ONE}1=", "2", tiny_vision.image())
    fails, succeeds = client.submit(image_query), client.submit(good)
    with pytest.raises(InvalidInput, match=message) as error:
        fails.result(60)
    last = f"token_ids[{len(image_query.token_ids) - 1}]"
    assert error.value.field in ("images", "token_ids", last)
    assert len(succeeds.result(60)) == 1


def test_more_bytes_than_a_request_holds_are_refused(client: TeacherClient) -> None:
    with pytest.raises(InvalidInput, match="one request holds") as error:
        client.submit(query(f"{ONE}1=", "2", bytes(65 << 20)))
    assert error.value.field == "images"


def test_a_request_in_parts_is_the_request() -> None:
    image_query = query(ONE * 2 + "1=", "2", large_image(), tiny_vision.image(1))
    messages = list(requests_of(image_query, "7"))
    assert len(messages) > 2
    assert all(message.ByteSize() < MAX_MESSAGE_BYTES for message in messages)
    joined = b"".join(message.images for message in messages)
    assert joined == request_of(image_query, "7").images
    assert [*messages[0].image_sizes] == [len(image) for image in image_query.images]
    assert parse_request(request_of(image_query, "7"), LIMITS).images == image_query.images


def test_a_teacher_without_images_refuses_them() -> None:
    request = request_of(query(f"{ONE}1=", "2", tiny_vision.image()), "7")
    blind = RequestLimits(len(WORDS), 100, 8)
    with pytest.raises(InvalidInput, match="this teacher reads no images"):
        parse_request(request, blind)
    # As before, a placeholder is a token like any other to it.
    request.ClearField("images")
    request.ClearField("image_sizes")
    assert parse_request(request, blind).images == ()


@pytest.mark.parametrize("sizes", [[], [1], [1, 3], [5, 0], [2, 4]])
def test_sizes_must_be_those_of_the_images(sizes: list[int]) -> None:
    request = request_of(query(f"{ONE}1=", "2"), "7")
    image_fields = teacher_pb2.ScoreRequest(images=b"12345", image_sizes=sizes)
    request.MergeFrom(image_fields)
    with pytest.raises(InvalidInput) as error:
        parse_request(request, LIMITS)
    assert error.value.field == "image_sizes"

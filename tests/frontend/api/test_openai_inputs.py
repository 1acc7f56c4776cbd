"""Every wire form of an input, and what it becomes."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.errors import InvalidInput
from tessera.frontend.api.openai import parse_embeddings
from tessera.frontend.request import EmbeddingsRequest, ImageSource, Input, RequestLimits
from tessera.models.base import Role

PNG = "data:image/png;base64,iVBORw0KGgo="
WEB = "https://example.com/cat.png"


def parse(**body: object) -> EmbeddingsRequest:
    return parse_embeddings(body)


def inputs(value: object, **more: object) -> tuple[Input, ...]:
    return parse_embeddings({"input": value, **more}).inputs


def text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def image_part(url: str = WEB) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def text_of(found: Input) -> object:
    """Its token ids, or its texts joined, as a family that puts images first reads them."""
    if isinstance(found.parts[0], np.ndarray):
        return tuple(found.parts[0].tolist())
    return "".join(part for part in found.parts if isinstance(part, str))


def summary(found: Input) -> tuple[object, list[str], Role]:
    return text_of(found), [image.url for image in found.images], found.role


def order(found: Input) -> list[object]:
    return [part.url if isinstance(part, ImageSource) else part for part in found.parts]


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ([text_part("a "), image_part(), text_part("b")], ["a ", WEB, "b"]),
        ([image_part(), text_part("a"), text_part(""), image_part(PNG)], [WEB, "a", PNG]),
        (f"a {PNG}\n{PNG} cat", ["a", PNG, PNG, "\ncat"]),
        (f"{PNG} cat", [PNG, "cat"]),
        ({"text": "a", "image": WEB}, [WEB, "a"]),
        ({"content": [text_part("a"), image_part()]}, ["a", WEB]),
    ],
)
def test_texts_and_images_keep_their_order(value: object, parts: list[object]) -> None:
    (found,) = inputs([value] if isinstance(value, dict) else value)
    assert order(found) == parts


def test_an_instruction_is_the_most_specific_one() -> None:
    for item in ("a", {"text": "a"}, [text_part("a")], {"content": "a"}, {"role": "user", "content": "a"}):
        assert inputs([item])[0].instruction is None
        assert inputs([item], instruction="find")[0].instruction == "find"
    for item in ({"text": "a"}, {"content": "a"}, {"role": "user", "content": "a"}):
        assert inputs([{**item, "instruction": "own"}], instruction="find")[0].instruction == "own"
        assert inputs([{**item, "instruction": None}], instruction="find")[0].instruction == "find"
    found = inputs(["a", {"text": "b", "instruction": "own"}, "c"])
    assert [one.instruction for one in found] == [None, "own", None]


def test_a_system_message_is_the_instruction() -> None:
    user = {"role": "user", "content": [image_part(), text_part("")]}
    silent = {"role": "assistant", "content": [text_part("")]}
    for said in ("find", [text_part("fi"), text_part("nd")]):
        for role in ("system", "developer"):
            system = {"role": role, "content": said}
            for conversation in ([system, user], [system, user, silent]):
                (found,) = parse(messages=conversation, instruction="other").inputs
                assert (found.instruction, order(found), found.param) == ("find", [WEB], "messages")
                assert found.images[0].param == "messages[1].content[0].image_url.url"
                (found,) = inputs([conversation])
                assert (found.instruction, order(found)) == ("find", [WEB])
    (found,) = parse(messages=[user, {"role": "assistant", "content": ""}]).inputs
    assert (found.instruction, order(found)) == (None, [WEB])
    (found,) = parse(messages=[{"role": "system", "content": "a"}]).inputs
    assert (found.instruction, order(found)) == (None, ["a"])
    batch = parse(messages=[[{"role": "system", "content": "x"}, user], [user]]).inputs
    assert [one.instruction for one in batch] == ["x", None]
    # As the client of vLLM that its authors show sends it.
    shown = parse(
        messages=[{"role": "system", "content": "x"}, user, silent],
        continue_final_message=True,
        add_special_tokens=True,
    )
    assert shown.inputs[0].instruction == "x"


def test_rows_may_come_with_their_grid() -> None:
    for grid in ([1, 4, 6], [[1, 4, 6]]):
        part = {"type": "image_embeds", "image_embeds": {"image_embeds": "QUJD", "image_grid_thw": grid}}
        (image,) = inputs([[part]])[0].images
        assert (image.embeddings, image.grid) == (True, (1, 4, 6))
        assert image.param == "input[0][0].image_embeds.image_embeds"
    (image,) = inputs([[{"type": "image_embeds", "image_embeds": {"image_embeds": "QUJD"}}]])[0].images
    assert image.grid is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hello", [("hello", [], Role.NONE)]),
        (["a", "b"], [("a", [], Role.NONE), ("b", [], Role.NONE)]),
        ([1, 2, 3], [((1, 2, 3), [], Role.NONE)]),
        ([[1, 2], [3]], [((1, 2), [], Role.NONE), ((3,), [], Role.NONE)]),
        (PNG, [("", [PNG], Role.PASSAGE)]),
        (f"a cat\n{PNG}", [("a cat", [PNG], Role.PASSAGE)]),
        (f"a cat {PNG}", [("a cat", [PNG], Role.PASSAGE)]),
        (f"{PNG} a cat", [("a cat", [PNG], Role.PASSAGE)]),
        (f"a {PNG}\n{PNG} cat", [("a\ncat", [PNG, PNG], Role.PASSAGE)]),
        (f"see<{PNG}>", [(f"see<{PNG}>", [], Role.NONE)]),
        ("write data:image/png;base64, first", [("write data:image/png;base64, first", [], Role.NONE)]),
        (WEB, [(WEB, [], Role.NONE)]),
        ({"text": "a"}, [("a", [], Role.NONE)]),
        ([{"text": "a", "image": WEB}], [("a", [WEB], Role.PASSAGE)]),
        ([{"text": None, "image": WEB}], [("", [WEB], Role.PASSAGE)]),
        ([{"image": "/9j/4AAQSkZJRg=="}], [("", ["data:;base64,/9j/4AAQSkZJRg=="], Role.PASSAGE)]),
        ([{"image": "iVBORw0KGgo="}], [("", ["data:;base64,iVBORw0KGgo="], Role.PASSAGE)]),
        ([{"image": "/srv/media/cat.png"}], [("", ["/srv/media/cat.png"], Role.PASSAGE)]),
        ([text_part("a "), image_part(), text_part("b")], [("a b", [WEB], Role.PASSAGE)]),
        (
            ["x", [text_part("a"), image_part()], [text_part("b")]],
            [("x", [], Role.NONE), ("a", [WEB], Role.PASSAGE), ("b", [], Role.NONE)],
        ),
        ([{"type": "input_text", "text": "a"}], [("a", [], Role.NONE)]),
        ([{"type": "input_image", "image_url": WEB, "detail": "auto"}], [("", [WEB], Role.PASSAGE)]),
        ([{"type": "image_base64", "image_base64": PNG}], [("", [PNG], Role.PASSAGE)]),
        ([{"type": "image", "image": WEB}], [("", [WEB], Role.PASSAGE)]),
        ([{"role": "query", "content": "a"}], [("a", [], Role.QUERY)]),
        ([[{"role": "query", "content": [image_part()]}]], [("", [WEB], Role.QUERY)]),
        ([{"content": [text_part("a")]}, {"content": "b"}], [("a", [], Role.NONE), ("b", [], Role.NONE)]),
        (
            ["a", {"role": "document", "content": "b"}, [7], {"text": "c"}],
            [("a", [], Role.NONE), ("b", [], Role.PASSAGE), ((7,), [], Role.NONE), ("c", [], Role.NONE)],
        ),
    ],
)
def test_input_forms(value: object, expected: list[object]) -> None:
    assert [summary(found) for found in inputs(value)] == expected


def test_messages_are_one_conversation_or_a_batch() -> None:
    message = {"role": "user", "content": [image_part(), text_part("a cat")]}
    assert [summary(found) for found in parse(messages=[message]).inputs] == [("a cat", [WEB], Role.PASSAGE)]
    batch = parse(messages=[[message], [{"role": "query", "content": "b"}]]).inputs
    assert [found.param for found in batch] == ["messages[0]", "messages[1]"]
    assert summary(batch[1]) == ("b", [], Role.QUERY)


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "image_base64"])
def test_a_uuid_stands_for_what_was_sent_before(kind: str) -> None:
    key = "image_url" if kind in ("image_url", "input_image") else kind
    for part in ({"type": kind, "uuid": "a"}, {"type": kind, key: None, "uuid": "a"}):
        found = parse_embeddings({"input": [[part]]}).inputs[0]
        assert found.images == (ImageSource(url="", param=f"input[0][0].{key}", uuid="a"),)


def test_params_and_uuids_are_exact() -> None:
    part = {**image_part(), "uuid": "cat-1"}
    (found,) = parse(messages=[{"role": "user", "content": [text_part("a"), part]}]).inputs
    assert found.param == "messages"
    assert found.images == (ImageSource(url=WEB, param="messages[0].content[1].image_url.url", uuid="cat-1"),)
    assert inputs(["a", [image_part()]])[1].images[0].param == "input[1][0].image_url.url"
    assert inputs(["a", {"image": WEB}])[1].images[0].param == "input[1].image"
    assert inputs(["a", PNG])[1].images[0].param == "input[1]"
    assert inputs("a")[0].param == "input"
    assert inputs([1, 2])[0].param == "input"


@pytest.mark.parametrize(
    ("body", "role"),
    [
        ({"input": "a"}, Role.NONE),
        ({"input": PNG}, Role.PASSAGE),
        ({"input": "a", "input_type": "query"}, Role.QUERY),
        ({"input": "a", "input_type": "passage"}, Role.PASSAGE),
        ({"input": PNG, "input_type": "query"}, Role.QUERY),
        ({"input": "a", "task": "retrieval.query"}, Role.QUERY),
        ({"input": "a", "model": "m-query"}, Role.QUERY),
        ({"input": "a", "model": "m-passage"}, Role.PASSAGE),
        ({"input": "a", "model": "m-query", "input_type": "passage"}, Role.PASSAGE),
        ({"input": [{"role": "query", "content": "a"}], "input_type": "passage"}, Role.QUERY),
        ({"input": [{"role": "user", "content": "a"}], "input_type": "passage"}, Role.PASSAGE),
        ({"input": [1, 2], "input_type": "query"}, Role.NONE),
    ],
)
def test_role_table(body: dict[str, object], role: Role) -> None:
    assert parse_embeddings(body).inputs[0].role is role


def test_model_suffix_is_removed_only_where_it_is_one() -> None:
    def model(name: str, *served: str) -> str | None:
        return parse_embeddings({"input": "a", "model": name}, models=served).model

    assert model("m-query") == "m"
    assert model("m-query", "m") == "m"
    assert model("m-query", "m-query") == "m-query"
    assert model("x-query", "m") == "x-query"
    assert model("Org/M.1-query", "org/m_1") == "Org/M.1"
    assert model("Org/M.1-query", "org/m_1-query") == "Org/M.1-query"
    assert model("-query") == "-query"
    assert parse(input="a").model is None


@pytest.mark.parametrize(
    ("value", "modality", "expected"),
    [
        (f"about {PNG}", "text", (f"about {PNG}", [])),
        (PNG, "image", ("", [PNG])),
        (WEB, "image", ("", [WEB])),
        (f"a cat {WEB}", "text_image", ("a cat", [WEB])),
        (f"a {WEB} {PNG}", "text_image", (f"a {WEB}", [PNG])),
    ],
)
def test_modality_says_how_to_read_a_string(value: str, modality: str, expected: object) -> None:
    (found,) = inputs(value, modality=modality)
    assert summary(found)[:2] == expected


def test_one_modality_in_a_list_is_that_of_all() -> None:
    found = inputs([PNG, PNG], modality=["image"])
    assert [len(entry.images) for entry in found] == [1, 1]


def test_modality_for_each_input() -> None:
    found = inputs(["a", PNG, f"b {PNG}"], modality=["text", "image", "text_image"])
    assert [(text_of(item), len(item.images)) for item in found] == [("a", 0), ("", 1), ("b", 1)]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "neither"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", "both"),
        ({"input": []}, "input", "at least one input"),
        ({"input": ""}, "input", "empty string"),
        ({"input": 7}, "input", "found 7"),
        ({"input": True}, "input", "found true"),
        ({"input": ["a", ""]}, "input[1]", "empty string"),
        ({"input": ["a", None]}, "input[1]", "found null"),
        ({"input": ["a", 3]}, "input[1]", "found 3"),
        ({"input": [1, -1]}, "input[1]", "found -1"),
        ({"input": [1, True]}, "input[1]", "found true"),
        ({"input": [1.5]}, "input[0]", "found 1.5"),
        ({"input": [float("nan")]}, "input[0]", "found nan"),
        ({"input": [[1, "a"]]}, "input[0][1]", "found 'a'"),
        ({"input": [[2**31]]}, "input[0][0]", "token id"),
        ({"input": [[]]}, "input[0]", "an empty list"),
        ({"input": [["a"]]}, "input[0][0]", "found 'a'"),
        ({"input": [[[1]]]}, "input[0][0]", "a list of 1"),
        ({"input": [{}]}, "input[0]", "text, image or both"),
        ({"input": [{"text": 1}]}, "input[0].text", "found 1"),
        ({"input": [{"text": "a", "img": WEB}]}, "input[0].img", "unknown key"),
        ({"input": [{"image": {"url": WEB}}]}, "input[0].image", "an object"),
        ({"input": [{"image": "ftp://user:secret@x"}]}, "input[0].image", "data, http, https or file URL"),
        ({"input": ["a", text_part("b")]}, "input[1]", "beside inputs of another kind"),
        ({"input": text_part("b")}, "input", "in a list"),
        ({"input": [[text_part("")]]}, "input[0][0].text", "empty string"),
        ({"input": [[{"type": "text"}]]}, "input[0][0].text", "found null"),
        ({"input": [[{"type": "video_url", "video_url": "x"}]]}, "input[0][0].type", "'video_url'"),
        ({"input": [[text_part("a"), "b"]]}, "input[0][1]", "a content part"),
        ({"input": [[{"type": "image_url"}]]}, "input[0][0].image_url", "found null"),
        ({"input": [[image_part("gopher://x")]]}, "input[0][0].image_url.url", "data, http, https"),
        ({"input": [[image_part("gopher://x/a.jpg")]]}, "input[0][0].image_url.url", "data, http, https"),
        ({"input": [[image_part("images/a.jpg")]]}, "input[0][0].image_url.url", "that is a path"),
        ({"input": {"image": "C:\\images\\a.jpg"}}, "input.image", "that is a path"),
        (
            {"input": [[{"type": "image_url", "image_url": {"url": WEB, "x": 1}}]]},
            "input[0][0].image_url.x",
            "unknown key",
        ),
        (
            {"input": [[{"type": "image_url", "image_url": {"url": WEB, "detail": "high"}}]]},
            "input[0][0].image_url.detail",
            "auto",
        ),
        ({"input": [[{"type": "image_url"}]]}, "input[0][0].image_url", "expected an image"),
        ({"input": [[{"type": "image_embeds", "uuid": "a"}]]}, "input[0][0].image_embeds", "an image"),
        ({"input": [[{**image_part(), "uuid": ""}]]}, "input[0][0].uuid", "1 to 256"),
        ({"input": [1, 1e30]}, "input[1]", "1e+30 is too large: the most is 2147483647"),
        ({"input": [[{"role": "bot", "content": "a"}]]}, "input[0][0].role", "found 'bot'"),
        ({"input": [[{"role": "user", "content": 1}]]}, "input[0][0].content", "found 1"),
        ({"input": [[{"role": "user", "content": []}]]}, "input[0][0].content", "an empty list"),
        ({"input": [[{"content": "a"}]]}, "input[0][0].role", "found null"),
        ({"input": [{"role": "user", "content": "a", "name": "x"}]}, "input[0].name", "unknown key"),
        ({"messages": []}, "messages", "an empty list"),
        ({"messages": [[]]}, "messages[0]", "an empty list"),
        ({"messages": "a"}, "messages", "found 'a'"),
        ({"messages": ["a"]}, "messages[0]", "a message"),
        ({"messages": [{"role": "user", "content": "a"}] * 2}, "messages", "[[message], [message]]"),
        ({"messages": [{"role": "system", "content": "a"}] * 3}, "messages", "found 3"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "messages",
            "found 2",
        ),
        (
            {"messages": [{"role": "system", "content": [image_part()]}, {"role": "user", "content": "a"}]},
            "messages[0].content",
            "found an image",
        ),
        (
            {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "a"}]},
            "messages[0].content",
            "empty string",
        ),
        ({"input": "a", "instruction": ""}, "instruction", "empty string"),
        ({"input": "a", "instruction": 1}, "instruction", "found 1"),
        ({"input": [{"text": "a", "instruction": 1}]}, "input[0].instruction", "found 1"),
        ({"input": [[1, 2]], "instruction": "a"}, "instruction", "taken as they are"),
        (
            {"input": [[{"type": "image_embeds", "image_embeds": {"image_embeds": "A", "grid": 1}}]]},
            "input[0][0].image_embeds.grid",
            "unknown key",
        ),
        (
            {
                "input": [
                    [{"type": "image_embeds", "image_embeds": {"image_embeds": "A", "image_grid_thw": [1]}}]
                ]
            },
            "input[0][0].image_embeds.image_grid_thw",
            "[t, h, w]",
        ),
        (
            {
                "input": [
                    [
                        {
                            "type": "image_embeds",
                            "image_embeds": {"image_embeds": "A", "image_grid_thw": [1, 0, 2]},
                        }
                    ]
                ]
            },
            "input[0][0].image_embeds.image_grid_thw[1]",
            "found 0",
        ),
        (
            {"messages": [{"role": "user", "content": [text_part("a"), image_part("x")]}]},
            "messages[0].content[1].image_url.url",
            "URL",
        ),
        ({"input": "a", "modality": "image"}, "input", "an image alone"),
        ({"input": PNG, "modality": "text_image"}, "input", "must be non-empty"),
        ({"input": "a", "modality": "text_image"}, "input", "expects an image"),
        ({"input": {"image": WEB, "text": "a"}, "modality": "text"}, "input", "expects no image"),
        ({"input": ["a"] * 3, "modality": ["text"] * 2}, "modality", "each of the 3 inputs, found 2"),
        ({"input": "a", "modality": "video"}, "modality", "one of text, image, text_image"),
        ({"input": "a", "modality": ["sound"]}, "modality[0]", "found 'sound'"),
    ],
)
def test_errors_name_path_and_reason(body: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_embeddings(body)
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.message.startswith(param) or param == "instruction"
    assert "secret" not in caught.value.message


def test_limits_name_both_numbers() -> None:
    limits = RequestLimits(inputs=2, images_per_input=1, characters=5)
    for body, numbers in [
        ({"input": ["a"] * 3}, ("2", "3")),
        ({"input": [[image_part(), image_part()]]}, ("1", "2")),
        ({"input": ["abcdef"]}, ("5", "6")),
        ({"input": [[1] * 6]}, ("5", "6")),
    ]:
        with pytest.raises(InvalidInput) as caught:
            parse_embeddings(body, limits=limits)
        assert all(number in caught.value.message for number in numbers)


def test_payloads_are_never_repeated() -> None:
    payload = "data:image/png;base64,SECRETSECRET"
    for body in [
        {"input": "a", "user": 1, "encoding_format": payload},
        {"input": [[{"role": payload, "content": "a"}]]},
        {"input": [[{"type": payload}]]},
        {"input": "a", "truncate": "A" * 500},
    ]:
        with pytest.raises(InvalidInput) as caught:
            parse_embeddings(body)
        assert "SECRET" not in caught.value.message
        assert len(caught.value.message) < 400

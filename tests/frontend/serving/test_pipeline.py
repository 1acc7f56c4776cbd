"""From requests to rows: what reaches the workers, for families that differ in what they take and give."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera import wire
from tessera.errors import InvalidInput, TesseraError, UnsupportedMedia
from tessera.frontend.api.openai import parse_embeddings
from tessera.frontend.media import MediaLoader, MediaPolicy
from tessera.frontend.metrics import FrontendMetrics
from tessera.frontend.request import ImageSource, Input, ScoreRequest
from tessera.frontend.serving.dispatch import Answer, Call
from tessera.frontend.serving.pipeline import Cost, Pipeline, Result, Scores
from tessera.frontend.settings import Limits
from tessera.models.base import SCORES, Content, ImagePlan, Model, Output, OutputKind, Prompt, Role, Truncate
from tessera.tasks import Deadline
from tests.families import pairs as families
from tests.families.dual_encoder import DualEncoder

WIDTH = 48


class Pairs(families.Pairs):
    """A reranker that keeps the texts of the sides it was asked to tokenise."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(Path("/nowhere"), 1)
        object.__setattr__(self, "sides", [])

    def _side(self, content: Content, bound: int | None, param: str) -> Prompt:
        self.sides.append("".join(part for part in content.parts if isinstance(part, str)))
        return super()._side(content, bound, param)


class Family(DualEncoder):
    """A model that keeps the contents it was asked to make prompts of."""

    output = Output(kind=OutputKind.VECTOR, width=WIDTH)

    def __init__(self, **changes: Any) -> None:
        super().__init__(Path("/nowhere"), 1)
        object.__setattr__(self, "contents", [])
        for name, value in changes.items():
            object.__setattr__(self, name, value)

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        self.contents.append(content)
        if truncate is Truncate.END:
            content = replace(content, parts=(content.parts[0][:max_tokens],))
        return super().prompt(content, max_tokens=max_tokens, truncate=truncate, param=param)


class Embedder:
    """Rows as long as the item's first token, of unit length times two; counts what came."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self.items: list[wire.Item] = []
        self.failing: dict[int, TesseraError] = {}

    async def embed(self, items: Sequence[wire.Item], call: Call) -> Answer:
        self.items += items
        answer = Answer.empty(items, self.output)
        for index, item in enumerate(items):
            answer.rows.values[answer.rows.places([index])] = item.tokens[0]
        answer.rows.norms[:] = 2
        answer.errors = dict(self.failing)
        return answer


class Served:
    def __init__(self, family: Callable[..., Any] = Family, **changes: Any) -> None:
        self.model = family(**changes)
        self.embedder = Embedder(self.model.output)
        self.media = MediaLoader(MediaPolicy(allowed_local_path=Path("/nowhere")))
        typed: Model = self.model
        self.metrics = FrontendMetrics()
        self.pipeline = Pipeline(typed, self.media, self.embedder, Limits(), self.metrics.of("m"))
        self.charged: list[tuple[int, int, int]] = []

    async def run(self, **body: object) -> Result:
        call = Call(request_id="r", deadline=Deadline.after(60))
        work = await self.pipeline.prepare(parse_embeddings(body), call)
        if work.good:
            self.pay(work.cost)
        return await self.pipeline.embed(work, call)

    async def score(self, queries: Sequence[str], documents: Sequence[str], **changes: Any) -> Scores:
        return await self.score_request(
            ScoreRequest(
                queries=tuple(Input.of(parts=(text,), role=Role.QUERY, param="query") for text in queries),
                documents=tuple(
                    Input.of(parts=(text,), role=Role.PASSAGE, param=f"documents[{index}]")
                    for index, text in enumerate(documents)
                ),
                **changes,
            )
        )

    async def score_request(self, request: ScoreRequest) -> Scores:
        call = Call(request_id="r", deadline=Deadline.after(60))
        work = await self.pipeline.prepare_scores(request, call)
        self.pay(work.cost)
        return await self.pipeline.score(work, call)

    def pay(self, cost: Cost) -> None:
        self.charged.append((cost.tokens, cost.units, cost.rows))


def photo(photos: dict[str, bytes], name: str = "flower") -> dict[str, object]:
    url = "data:image/jpeg;base64," + base64.b64encode(photos[name]).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def rows_part(
    count: int, grid: list[int] | None = None, stored: np.ndarray | None = None
) -> dict[str, object]:
    from safetensors.numpy import save

    tensors = {"rows": np.ones((count, WIDTH), np.float32)}
    if stored is not None:
        tensors["image_grid_thw"] = stored
    data = base64.b64encode(save(tensors)).decode()
    return {"type": "image_embeds", "image_embeds": {"image_embeds": data, "image_grid_thw": grid}}


async def test_a_family_is_given_the_parts_in_the_clients_order(photos: dict[str, bytes]) -> None:
    served = Served()
    text = {"type": "text", "text": "ab"}
    await served.run(
        input=[[text, photo(photos), text, rows_part(3)], "c"], input_type="query", instruction="find"
    )
    first, second = served.model.contents
    plan = ImagePlan(units=1, rows=1)
    assert first.parts == ("ab", plan, "ab", ImagePlan(units=0, rows=3))
    assert second.parts == ("c",)
    assert (first.role, first.instruction, second.instruction) == ("query", "find", "find")
    assert [image.plan for image in served.embedder.items[0].images] == [plan, first.parts[3]]
    assert served.charged == [(2 + 1 + 2 + 3 + 1, 1, 2)]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(3,), (1, 3)])
async def test_rows_come_with_the_grid_that_the_client_says(dtype: Any, shape: tuple[int, ...]) -> None:
    served = Served()
    stored = np.array([1, 4, 6], dtype).reshape(shape)
    await served.run(input=[[rows_part(6, stored=stored)], [rows_part(6, [1, 6, 4])], [rows_part(6)]])
    grids = [item.images[0].grid for item in served.embedder.items]
    assert grids == [(1, 4, 6), (1, 6, 4), None]
    assert [content.images[0].grid for content in served.model.contents] == grids


@pytest.mark.parametrize(
    "stored",
    [
        np.array([1, 4], np.int64),
        np.array([1, 0, 4], np.int64),
        np.array([1, -4, 6], np.int32),
        np.array([1, 4, 1 << 40], np.int64),
        np.array([1.0, 4.0, 6.0], np.float32),
        np.array([[1, 4, 6], [1, 4, 6]], np.int64),
    ],
    ids=str,
)
async def test_a_grid_that_is_none_is_refused(stored: np.ndarray) -> None:
    with pytest.raises(InvalidInput, match="image_grid_thw") as caught:
        await Served().run(input=[[rows_part(6, stored=stored)]])
    assert caught.value.param == "input[0][0].image_embeds.image_embeds"


async def test_a_model_of_text_alone_refuses_images_before_they_are_fetched(photos: dict[str, bytes]) -> None:
    served = Served(vision=None)
    unreachable = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.jpg"}}
    for part in (photo(photos), unreachable, rows_part(3), {"type": "image_url", "uuid": "never sent"}):
        with pytest.raises(InvalidInput, match="reads text alone") as caught:
            await served.run(input=["a", [{"type": "text", "text": "b"}, part]])
        assert caught.value.param is not None and caught.value.param.startswith("input[1][1].image_")
    assert served.embedder.items == []
    result = await served.run(input=["a", [unreachable], ["", 1]], partial=True)
    assert sorted(result.errors) == [1, 2]
    assert (result.rows.values[0] == ord("a")).all() and not result.rows.values[1:].any()


async def test_failed_inputs_have_rows_of_zeros(photos: dict[str, bytes]) -> None:
    served = Served()
    served.embedder.failing = {0: InvalidInput("no", param="input[1]")}
    result = await served.run(input=[{"image": "data:image/png;base64,AAAA"}, "a", "b"], partial=True)
    assert sorted(result.errors) == [0, 1]
    assert result.rows.bounds.tolist() == [0, 1, 2, 3]
    assert (result.rows.values[2] == ord("b")).all() and not result.rows.values[0].any()


async def test_rows_for_each_token_are_charged_and_come_in_order() -> None:
    served = Served(output=Output(kind=OutputKind.TOKENS, width=4))
    result = await served.run(input=["abc", {"image": "data:image/png;base64,AAAA"}, "de"], partial=True)
    assert served.charged == [(5, 0, 5)]
    assert result.rows.bounds.tolist() == [0, 3, 3, 5]
    assert result.rows.values[:, 0].tolist() == [ord("a")] * 3 + [ord("d")] * 2


async def test_vectors_have_the_length_that_was_asked_for() -> None:
    unit = await Served().run(input="a")
    pooled = await Served().run(input="a", normalize=False)
    assert np.array_equal(2 * unit.rows.values, pooled.rows.values)
    other = Output(kind=OutputKind.VECTOR, width=WIDTH, unit_length=False)
    scaled = await Served(output=other).run(input="a")
    assert np.linalg.norm(scaled.rows.values) == pytest.approx(1)
    score = Output(kind=OutputKind.SCORE, width=1, unit_length=False)
    assert (await Served(output=score).run(input="a")).rows.values.tolist() == [[ord("a")]]


@pytest.mark.parametrize(
    ("dimensions", "said"),
    [
        (frozenset(), ": this model offers 48"),
        (frozenset(range(8, WIDTH)), ": this model offers 8 to 48"),
        (frozenset((16, 32)), ": this model offers 16, 32, 48"),
    ],
)
async def test_widths_that_a_model_offers_are_said(dimensions: frozenset[int], said: str) -> None:
    served = Served(dimensions=dimensions)
    for wrong in (7, 49):
        with pytest.raises(InvalidInput) as caught:
            await served.run(input="a", dimensions=wrong)
        assert said in caught.value.message and caught.value.param == "dimensions"
    for right in (*dimensions, WIDTH):
        assert (await served.run(input="a", dimensions=right)).rows.values.shape == (1, WIDTH)
    if 12 in dimensions:
        with pytest.raises(InvalidInput, match="binary packs eight values to a byte, and 12 is"):
            await served.run(input="a", dimensions=12, embed_dtype="binary")


class Directions:
    """Vectors that point where the item's tokens say, of length 2."""

    async def embed(self, items: Sequence[wire.Item], call: Call) -> Answer:
        answer = Answer.empty(items, Output(kind=OutputKind.VECTOR, width=WIDTH))
        for row, item in zip(answer.rows.values, items, strict=True):
            np.add.at(row, np.frombuffer(item.tokens, "<i4") % WIDTH, 1)
            row *= 2 / np.linalg.norm(row)
        return answer


@pytest.mark.parametrize("queries", [("ab",), ("ab", "b", "abc")], ids=["one query", "one for each"])
async def test_a_vector_model_scores_by_cosine(queries: tuple[str, ...]) -> None:
    served = Served(output=Output(kind=OutputKind.VECTOR, width=WIDTH, unit_length=False))
    served.pipeline._embedder = Directions()
    scores = await served.score(queries, ["a", "ab", "cd"])
    expected = [2**-0.5, 1, 0] if len(queries) == 1 else [2**-0.5, 2**-0.5, 6**-0.5]
    assert scores.values.dtype == np.float32 and scores.values == pytest.approx(expected)
    assert scores.kind is OutputKind.VECTOR
    inputs = len(queries) + 3
    assert served.charged == [(scores.usage.text_tokens, 0, inputs)]
    assert [content.role for content in served.model.contents] == [Role.QUERY] * len(queries) + [
        Role.PASSAGE
    ] * 3


async def test_each_side_has_a_bound_of_its_own() -> None:
    served = Served()
    for bounds, param in (({"max_query_tokens": 3}, "documents[1]"), ({"max_document_tokens": 3}, "query")):
        with pytest.raises(InvalidInput) as caught:
            await served.score(["abcdef"], ["ab", "abcdef"], max_tokens=5, **bounds)
        assert caught.value.param == param
        # A side over its own bound is cut; a wider bound than that of all is none.
        scores = await served.score(["abcdef"], ["ab", "abcdef"], max_tokens=6, **bounds)
        assert scores.usage.text_tokens == 14 - 3


class Rows:
    """Rows of unit length that the tokens decide, or what MaxSim makes of them; counts what came."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    async def embed(self, items: Sequence[wire.Item], call: Call) -> Answer:
        queries = call.queries
        self.calls.append((len(items), len(queries)))
        answer = Answer.empty(items, SCORES if queries else TOKENS)
        for index, item in enumerate(items):
            rows = token_rows(item.tokens)
            if queries:
                query = np.frombuffer(queries[item.query], "<f4").reshape(-1, TOKENS.width)
                rows = np.array([[np.einsum("id,jd->ij", query, rows).max(1).sum()]])
            answer.rows.values[answer.rows.places([index])] = rows
        answer.cached_tokens = [1] * len(items)
        return answer


TOKENS = Output(kind=OutputKind.TOKENS, width=4)


def token_rows(tokens: bytes) -> np.ndarray:
    table = np.random.default_rng(1).standard_normal((257, TOKENS.width))
    rows = table[np.frombuffer(tokens, "<i4")]
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("queries", [("ab",), ("ab", "b", "abc")], ids=["one query", "one for each"])
async def test_a_model_of_token_rows_scores_by_max_sim_with_the_queries_rows_fetched_once(
    queries: tuple[str, ...],
) -> None:
    served = Served(output=TOKENS)
    rows = served.pipeline._embedder = Rows()
    documents = ["a", "abcdef", "zzz"]
    scores = await served.score(queries, documents)
    expected = [
        np.einsum("id,jd->ij", token_rows(ids(query)), token_rows(ids(document))).max(1).sum()
        for query, document in zip(queries * (3 // len(queries)), documents, strict=True)
    ]
    assert scores.kind is OutputKind.TOKENS and scores.values == pytest.approx(expected, rel=1e-5)
    assert rows.calls == [(len(queries), 0), (3, len(queries))]
    tokens = sum(map(len, (*queries, *documents)))
    assert served.charged == [(tokens, 0, sum(map(len, queries)))]
    assert (scores.usage.text_tokens, scores.usage.cached_tokens) == (tokens, len(queries) + 3)
    counted = served.metrics.registry.get_sample_value
    assert counted("tessera_pairs_total", {"model": "m"}) == 3
    assert counted("tessera_output_rows_total", {"output": "multivector", "model": "m"}) == sum(
        map(len, queries)
    )


def ids(text: str) -> bytes:
    return np.array(list(text.encode()), "<i4").tobytes()


def side(*parts: str | ImageSource, param: str, role: Role = Role.PASSAGE) -> Input:
    return Input.of(parts=parts, role=role, param=param)


def reranker() -> Served:
    return Served(Pairs, output=Pairs.output)


@pytest.mark.parametrize("queries", [("ab",), ("ab", "b", "abc")], ids=["one query", "one for each"])
async def test_a_reranker_scores_pairs(queries: tuple[str, ...]) -> None:
    served = reranker()
    scores = await served.score(queries, ["a", "bc", "def"])
    pairs = [
        f"{query}\0{document}"
        for query, document in zip(queries * (3 // len(queries)), ("a", "bc", "def"), strict=True)
    ]
    assert [item.tokens for item in served.embedder.items] == [ids(pair) for pair in pairs]
    assert [item.param for item in served.embedder.items] == [f"documents[{index}]" for index in range(3)]
    assert scores.values.tolist() == [ord(query[0]) for query in (queries * 3)[:3]]
    # A query counts in each of its pairs.
    tokens = sum(map(len, pairs))
    assert served.charged == [(tokens, 0, 3)] and scores.usage.text_tokens == tokens
    assert served.model.sides.count(queries[0]) == 1


async def test_a_pairs_error_names_the_document_or_the_query() -> None:
    served = reranker()
    for queries, documents, bounds, param in (
        (["ab"], ["a", "abc", "abcd"], {"max_tokens": 5}, "documents[1]"),
        (["ab"], ["a", ""], {}, "documents[1]"),
        ([""], ["a"], {}, "query"),
        (["a", ""], ["a", "b"], {}, "query"),
    ):
        with pytest.raises(InvalidInput) as caught:
            await served.score(queries, documents, **bounds)
        assert caught.value.param == param
    assert served.embedder.items == [] and served.charged == []
    scores = await served.score(
        ["abcdef"], ["abcdef"], max_tokens=8, max_query_tokens=3, max_document_tokens=5, truncate=Truncate.END
    )
    assert served.embedder.items[0].tokens == ids("abc\0abcd") and len(scores.values) == 1
    with pytest.raises(UnsupportedMedia) as caught:
        await served.score_request(
            ScoreRequest(
                queries=(side("a", param="query"),),
                documents=(
                    side("a", param="documents[0]"),
                    side(
                        ImageSource(url="data:image/png;base64,AAAA", param="documents[1]"),
                        param="documents[1]",
                    ),
                    side("", param="documents[2]"),
                ),
            )
        )
    assert caught.value.param == "documents[1]"


async def test_images_of_both_sides_are_loaded_and_counted_once(photos: dict[str, bytes]) -> None:
    served = reranker()
    sources = [
        ImageSource(url="data:image/jpeg;base64," + base64.b64encode(photos[name]).decode(), param=name)
        for name in ("flower", "china")
    ]
    loads: list[str] = []
    load = served.media.load

    async def counted(source: ImageSource, **options: Any) -> Any:
        loads.append(source.param)
        return await load(source, **options)

    served.media.load = counted  # type: ignore[method-assign]
    scores = await served.score_request(
        ScoreRequest(
            queries=(side("a", sources[0], param="query"),),
            documents=(side(sources[1], "b", param="d[0]"), side("c", param="d[1]"), side("d", param="d[2]")),
        )
    )
    assert sorted(loads) == ["china", "flower"]
    assert [[image.param for image in item.images] for item in served.embedder.items] == [
        ["flower", "china"],
        ["flower"],
        ["flower"],
    ]
    (tokens, units, rows) = served.charged[0]
    assert (tokens, units, rows) == (5 + 4 + 4, 2, 3)
    assert (scores.usage.image_tokens, scores.usage.text_tokens) == (4, 9)

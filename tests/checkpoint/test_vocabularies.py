"""Published vocabularies: 10,000 texts of many scripts have the tokens of the package that carries them.

The packages' own tokenizers are tiktoken's; BERT's is WordPiece over the words of ``vocab.txt``. None of them
looks for special tokens in a text. ``transformers`` converts the vocabularies to ``tokenizer.json``.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.mistral.tokenizer import MistralConverter

from tessera.checkpoint.tokenizer import PlainTokenizer
from tessera.models import open_model
from tessera.models.base import Content, Model, Role, Truncate
from tessera_tools.random_checkpoint.checkpoint import main as write_checkpoint
from tests import minilm
from tests.clients.environment import clients_environment

pytestmark = [pytest.mark.installs, pytest.mark.timeout(600)]

COUNT = 10_000
# Latin, Greek, Cyrillic, Armenian, Hebrew, Arabic, Devanagari, Bengali, Tamil, Thai, Tibetan, Georgian, jamo,
# Ethiopic, Hangul, kana, Han, emoji and their modifiers, marks, digits of several scripts, symbols.
RANGES = [
    *((0x61, 0x7A), (0x41, 0x5A), (0xC0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x531, 0x587)),
    *((0x5D0, 0x5EA), (0x620, 0x6D3), (0x900, 0x97F), (0x985, 0x9E3), (0xB85, 0xBCD), (0xE01, 0xE4E)),
    *((0xF40, 0xFBC), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x137F), (0xAC00, 0xD7A3)),
    *((0x3041, 0x30FF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x20100), (0x1F300, 0x1F64F)),
    *((0x1F3FB, 0x1F3FF), (0x200B, 0x200F), (0x300, 0x36F), (0x30, 0x39), (0x660, 0x669), (0xFF10, 0xFF19)),
    *((0x21, 0x2F), (0x3A, 0x40), (0x2010, 0x2044), (0x2190, 0x22FF), (0xFB00, 0xFB4F), (0x1D400, 0x1D4FF)),
]
SPACES = [" "] * 12 + [
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    " \n",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x85",
    "",
]
PROMPTS = ["query: ", "passage: ", "Instruct: Given a question, retrieve passages\nQuery:"]
INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
LITERALS = [
    *(
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|endoftext|>",
        "<|im_start|>",
        "<|extra_7|>",
        "<s>",
        "</s>",
        "[INST]",
    ),
    *(
        "[CLS]",
        "[SEP]",
        "[UNK]",
        "[MASK]",
        "<|reserved_special_token_3|>",
        "<SPECIAL_40>",
        "don't",
        "I'LL",
        "'S",
    ),
]

Own = Callable[[str], Sequence[int]]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Words of all scripts, paragraphs of Python's own manual, prompts, and literal special tokens."""
    source = random.Random(0)
    lines = [line for topic in pydoc_data.topics.topics.values() for line in topic.split("\n\n") if line]

    def word() -> str:
        if source.random() < 0.05:
            return source.choice(LITERALS)
        first, last = source.choice(RANGES)
        return "".join(chr(source.randint(first, last)) for _ in range(source.randint(1, 8)))

    def text() -> str:
        if source.random() < 0.2:
            return source.choice(lines)[:400] + source.choice(LITERALS)
        words = (word() + source.choice(SPACES) for _ in range(source.choice([1, 2, 5, 10, 20])))
        return source.choice(["", "", " ", *PROMPTS]) + "".join(words)

    return [" ", *LITERALS, *(text() for _ in range(COUNT - 1 - len(LITERALS)))]


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    """Where the packages are; they can be imported meanwhile, without their own dependencies."""
    (found,) = clients_environment("vocabularies").glob("lib/python*/site-packages")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(found)
        # What stands in their __init__ imports a client of a service, and what that needs.
        for name in ("dashscope", "dashscope.tokenizers"):
            package = ModuleType(name)
            package.__path__ = [str(found.joinpath(*name.split(".")))]
            patch.setitem(sys.modules, name, package)
        yield found


def converted(vocabulary: Path, pattern: str, special: Sequence[str]) -> Tokenizer:
    """What ``transformers`` makes of a file of tiktoken's."""
    converter: Any = TikTokenConverter
    made: Tokenizer = converter(str(vocabulary), pattern, extra_special_tokens=list(special)).converted()
    return made


def checkpoint(folder: Path, family: str, tokenizer: Tokenizer, size: int) -> Path:
    """A random checkpoint of the family with that tokenizer; its weights are of another size."""
    write_checkpoint(["--out", str(folder), "--family", family])
    tokenizer.save(str(folder / "tokenizer.json"))
    # A converted file is taken as it is by this class alone.
    changes = {
        "config.json": {"vocab_size": size},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, values in changes.items():
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def tokens(model: Model, text: str, role: Role = Role.NONE) -> list[int]:
    content = Content(parts=(text,), role=role)
    prompt = model.prompt(content, max_tokens=model.max_tokens, truncate=Truncate.NONE, param="input")
    return cast("list[int]", prompt.tokens.tolist())


def roles(texts: Sequence[str]) -> Iterator[tuple[str, Role]]:
    """Each text, a query or a passage now and then."""
    for number, text in enumerate(texts):
        yield text, (Role.QUERY, Role.PASSAGE)[number % 2] if number % 10 < 2 else Role.NONE


def test_llama_3(packages: Path, texts: list[str], tmp_path: Path) -> None:
    own: Any = import_module("llama_models.llama3.tokenizer").Tokenizer.get_instance()
    vocabulary = packages / "llama_models/llama3/tokenizer.model"
    made = converted(vocabulary, own.pat_str, own.special_tokens)
    model = open_model(checkpoint(tmp_path / "model", "llama_nemotron_embed", made, own.n_words))
    prefixes = {Role.QUERY: "query: ", Role.PASSAGE: "passage: "}
    for text, role in roles(texts):
        prompt = prefixes.get(role, "") + text
        expected = own.encode(prompt, bos=True, eos=False, allowed_special=set(), disallowed_special=())
        assert tokens(model, text, role) == expected, ascii(text)


def test_qwen(packages: Path, texts: list[str], tmp_path: Path) -> None:
    module = import_module("dashscope.tokenizers.qwen_tokenizer")
    vocabulary = packages / "dashscope/resources/qwen.tiktoken"
    own = module.QwenTokenizer(str(vocabulary))
    special = [token for _, token in module.SPECIAL_TOKENS]
    made = converted(vocabulary, module.PAT_STR, special)
    made.normalizer = normalizers.NFC()
    size = own.eod_id + len(special)
    model = open_model(checkpoint(tmp_path / "model", "qwen3_embedding", made, size))
    for text, role in roles(texts):
        prompt = (INSTRUCTION if role is Role.QUERY else "") + text
        expected = [*own.encode(prompt, allowed_special=set()), own.eod_id]
        assert tokens(model, text, role) == expected, ascii(text)


def test_mistral(packages: Path, texts: list[str], tmp_path: Path) -> None:
    """No family has this vocabulary: texts are given to the tokenizer of all of them.

    Its first 32,000 tokens, which the file's own setting picks, take half of the time that all would.
    """
    published = json.loads((packages / "mistral_common/data/tekken_240911.json").read_text())
    published["config"]["default_vocab_size"] = 32_000
    given = tmp_path / "tekken.json"
    given.write_text(json.dumps(published))
    own: Any = import_module("mistral_common.tokens.tokenizers.tekken").Tekkenizer.from_file(given)
    # The file has no special tokens: they stand in the code, which the converter wants installed.
    published["special_tokens"] = [
        {**token, "token_str": str(token["token_str"])} for token in own._all_special_tokens
    ]
    given.write_text(json.dumps(published))
    MistralConverter(str(given)).converted().save(str(tmp_path / "tokenizer.json"))
    tokenizer = PlainTokenizer.read(tmp_path, vocab_size=own.n_words)
    for text in texts:
        assert tokenizer.ids(text).tolist() == own.encode(text, bos=False, eos=False), ascii(text)


def test_bert(texts: list[str]) -> None:
    path = minilm.directory()
    model = open_model(path)
    words = models.WordPiece.from_file(str(path / "vocab.txt"), unk_token="[UNK]")
    own = Tokenizer(words)
    own.normalizer = normalizers.BertNormalizer(lowercase=True)
    own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first, last = (own.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    few = [text for text in texts if len(text) < 120]
    assert len(few) > COUNT // 2
    for text, found in zip(few, own.encode_batch_fast(few, add_special_tokens=False), strict=True):
        assert tokens(model, text) == [first, *found.ids, last], ascii(text)

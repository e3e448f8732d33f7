"""Embeddings and scores: which of them a checkpoint is for, and the prompts of its authors.

The prompts are those of Qwen3-VL-Embedding and Qwen3-VL-Reranker, as `qwen3_vl_embedding.py` and `qwen3_vl_reranker.py`
of https://github.com/QwenLM/Qwen3-VL-Embedding write them. The embedding is the normalised hidden state of a prompt's
last token; the score is the probability of "yes" against "no" as the next token. Knows nothing of HTTP.
"""

import itertools
import json
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.messages import PoolingParams
from mini_engine.protocol.bodies import ChatMessage, ChatRequest
from mini_engine.protocol.parts import Part
from mini_engine.protocol.pooling_bodies import Content, EmbeddingRequest, RankingRequest

T = TypeVar("T")
TaskKind = Literal["generate", "embed", "classify"]
FLAGS: dict[TaskKind, str] = {
    "generate": "--runner generate",
    "embed": "--runner pooling --convert embed",
    "classify": "--runner pooling --convert classify",
}

MODULES = "modules.json"  # sentence-transformers' list of what a checkpoint is made of
EMBED = "Represent the user's input."
RANK = "Given a search query, retrieve relevant candidates that answer the query."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
NOTHING = "NULL"  # in the place of an empty input
LEAST_NORM = 1e-12  # as in torch's `normalize`


@dataclass(frozen=True)
class Task:
    """What a server makes of prompts: text, embeddings, or scores."""

    kind: TaskKind
    dimensions: int  # of an embedding
    pooling: PoolingParams  # what engines return of a prompt, unless they generate

    @classmethod
    def of(cls, config: EngineConfig, model_dir: Path, hidden_size: int, vocab_size: int, tokenizer: Any) -> Self:
        """By `--runner` and `--convert`, and where these are `auto` by the checkpoint in `model_dir`. Raises
        ConfigError: its modules.json cannot be read; scores need two tokens that the tokenizer or the model lacks."""
        modules, kind = _modules(model_dir / MODULES), config.convert
        if config.runner == "generate" or (config.runner == kind == "auto" and modules is None):
            return cls("generate", hidden_size, PoolingParams())
        if kind == "auto":
            pools = modules is None or any(name.endswith("Pooling") for name in modules)
            kind = "embed" if pools else "classify"
        if kind == "embed":
            return cls(kind, hidden_size, PoolingParams())
        token_ids = [tokenizer.token_to_id(answer) for answer in ("yes", "no")]
        if not all(token_id is not None and token_id < vocab_size for token_id in token_ids):
            raise ConfigError("--convert: classify compares the tokens yes and no, which this model lacks")
        return cls(kind, hidden_size, PoolingParams(token_ids))


def _modules(path: Path) -> list[str] | None:
    """The types of the modules in the file; None without one."""
    if not path.is_file():
        return None
    try:
        return [str(module["type"]) for module in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{path} is not a list of modules; remove it, and set --runner") from None


# --- prompts ----------------------------------------------------------------------------------------------------------

InputPrompts = dict[str, ChatRequest | list[int]]  # a conversation or token ids, by what errors call the input


def embedding_prompts(body: EmbeddingRequest | RankingRequest) -> InputPrompts:
    """Those of the inputs; or of all queries, then of all documents, which have no instruction of the request."""
    if isinstance(body, RankingRequest):
        sides = zip(("queries", "documents"), (_system(body.instruction), _system(None)), body.sides, strict=True)
        return {
            f"{name}[{number}]": body.chat([system, _user(content)])
            for name, system, side in sides
            for number, content in enumerate(side)
        }
    system = _system(body.instruction)
    if body.messages is not None:
        return {"messages": body.chat([*[system] * (not body.has_system_message), *body.messages])}
    return {
        f"input[{number}]": item if isinstance(item, list) else body.chat([system, _user(item or NOTHING)])
        for number, item in enumerate(body.inputs)
    }


def ranking_prompts(body: RankingRequest) -> InputPrompts:
    """The conversation about each document and its query. The document is last, so that the others are a prefix which
    all of a query share."""
    (queries, documents), system = body.sides, ChatMessage(role="system", content=JUDGE)
    head, between = f"<Instruct>: {body.instruction or RANK}<Query>:", "\n<Document>:"
    return {
        f"documents[{number}]": body.chat([system, _user(head, query, between, document)])
        for number, (query, document) in enumerate(paired(queries, documents))
    }


def paired(queries: list[T], documents: list[T]) -> Iterator[tuple[T, T]]:
    """Each document after its query, of which there may be one for all."""
    return zip(queries * (len(documents) if len(queries) == 1 else 1), documents, strict=True)


def _system(instruction: str | None) -> ChatMessage:
    instruction = (instruction or EMBED).strip()
    ends = unicodedata.category(instruction[-1:] or ".").startswith("P")
    return ChatMessage(role="system", content=instruction if ends else f"{instruction}.")


def _user(*contents: str | Content) -> ChatMessage:
    """A message of texts, and of contents, in the place of which there is `NOTHING` if they are empty."""
    texts = (NOTHING if isinstance(each, list) and all(part.text == "" for part in each) else each for each in contents)
    parts = ([Part(type="text", text=each)] if isinstance(each, str) else each for each in texts)
    return ChatMessage(role="user", content=[*itertools.chain(*parts)])


# --- what the engine returns ------------------------------------------------------------------------------------------


def embedding(pooled: bytes, dimensions: int | None) -> np.ndarray:
    """The leading `dimensions` of a hidden state, at length 1. float32, little-endian, as `RequestOutput.pooled`."""
    vector = np.frombuffer(pooled, "<f4")[:dimensions]
    return vector / max(float(np.linalg.norm(vector)), LEAST_NORM)


def score(pooled: bytes) -> float:
    """The probability of yes against no: the sigmoid of the difference of their logits."""
    yes, no = np.frombuffer(pooled, "<f4").astype(float)
    return float(0.5 + 0.5 * np.tanh((yes - no) / 2))  # which overflows nowhere

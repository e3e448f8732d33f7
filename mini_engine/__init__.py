"""mini-engine: a small, complete inference engine for vision-language models.

`from mini_engine import LLM, Image, Video` is the engine from Python (`mini_engine/batch/llm.py`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mini_engine.batch.llm import LLM, Image, Video

__all__ = ["LLM", "Image", "Video"]


def __getattr__(name: str) -> Any:
    """Imported at its first use: an engine core imports this package, too, and needs no HTTP client."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mini_engine.batch import llm

    return getattr(llm, name)

"""Qwen2.5-VL (Bai et al. 2025) for inference: embeddings, vision tower, decoder and output head.

A step is `embed` -> put the rows of `encode_vision` in the placeholders' place -> `forward` -> `logits`. Every rank of
a tensor-parallel group makes the same calls with the same arguments and gets the same results; only the heads that its
`attend` sees are its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from mini_engine.model.config import ModelConfig
from mini_engine.model.layers import VocabParallelEmbedding
from mini_engine.model.parallel import Placement
from mini_engine.model.rope import Grid
from mini_engine.model.text import Attend, Decoder
from mini_engine.model.vision import VisionTower


@dataclass(frozen=True)
class AttentionShape:
    """What a rank's key-value cache must hold: per token and layer, one key and one value of `[kv_heads, head_dim]`."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


class Qwen2_5_VL(nn.Module):
    """One rank's part of the model. Contents are unset until `weights.load_weights` fills them.

    Raises ValueError if attention heads, of decoder or vision tower, do not divide by the group's size.
    """

    def __init__(self, config: ModelConfig, at: Placement) -> None:
        super().__init__()
        text = config.text
        self.config = config
        self.visual = VisionTower(config.vision, at)
        self.embedding = VocabParallelEmbedding(
            "model.language_model.embed_tokens", text.vocab_size, text.hidden_size, at
        )
        self.decoder = Decoder(text, at)
        self.head = (
            self.embedding
            if config.tie_word_embeddings
            else VocabParallelEmbedding("lm_head", text.vocab_size, text.hidden_size, at)
        )
        kv_heads = at.tp.kv_heads(text.num_kv_heads)
        self.attention_shape = AttentionShape(
            text.num_layers, text.num_heads // at.tp.size, kv_heads.stop - kv_heads.start, text.head_dim
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """int `[n]` -> `[n, hidden_size]`. Placeholders get rows too, which the caller overwrites."""
        return self.embedding(token_ids)

    def encode_vision(self, patches: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """Encode any number of images (time 1) and videos in one call.

        Args:
            patches: `[sum of t * h * w, channels * temporal * patch * patch]`, normalised, in the parameters' dtype;
                items one after the other.
            grids: (t, h, w) per item, in patches.

        Returns:
            Per item `[t * h * w / merge unit, hidden_size]`: views of one tensor.

        Raises:
            ValueError: the grids do not fit the patches.
        """
        unit = self.config.vision.merge_unit
        return list(self.visual(patches, grids).split([t * h * w // unit for t, h, w in grids]))

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the decoder over a flat batch.

        Args:
            hidden: `[n, hidden_size]`, from `embed` and `encode_vision`.
            positions: int64 `[3, n]`, time, height and width; see `rope.mrope_positions`.
            attend: called once per layer, in order.

        Returns:
            `[n, hidden_size]`, after the final norm.
        """
        return self.decoder(hidden, positions, attend)

    def logits(self, rows: Tensor) -> Tensor:
        """`[rows, hidden_size]` -> `[rows, vocab_size]` in the parameters' dtype, whole on every rank."""
        return self.head.project(rows)

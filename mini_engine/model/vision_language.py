"""A model for inference: embeddings, vision tower, decoder and output head. Differences between families are elsewhere.

A step is `embed` -> `forward` -> `logits`, with the rows of `encode_vision` in the placeholders' place. Every rank of a
tensor-parallel group makes the same calls with the same arguments and gets the same results; only the heads that its
`attend` sees are its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from mini_engine.matmul import in_float32
from mini_engine.model.config import ModelConfig
from mini_engine.model.layers import VocabParallelEmbedding
from mini_engine.model.parallel import Placement
from mini_engine.model.quantization import DENSE_BITS
from mini_engine.model.rope import Grid
from mini_engine.model.text import Attend, Decoder, MediaRows
from mini_engine.model.towers.spread_tower import SpreadTower
from mini_engine.model.towers.vision import last_of


@dataclass(frozen=True)
class AttentionShape:
    """What a rank's key-value cache must hold: per token and layer with attention, one key and one value of
    `[kv_heads, head_dim]`."""

    layers: int
    kv_heads: int
    head_dim: int


class VisionLanguageModel(nn.Module):
    """One rank's part of the model. Contents are unset until `weights.load_weights` fills them. The heads divide by the
    group's size, as the start has checked.

    `state_shape` has this rank's heads; it is None if all of the decoder's layers have attention.
    """

    def __init__(self, config: ModelConfig, at: Placement) -> None:
        super().__init__()
        text = config.text
        self.config = config
        tower = text.spec.load_tower()
        self.visual = SpreadTower(tower, config.vision, at) if at.spread_tower else tower(config.vision, at)
        tied, rows = config.tie_word_embeddings, (text.vocab_size, text.hidden_size)
        table = "model.language_model.embed_tokens"
        self.embedding = VocabParallelEmbedding(table, *rows, at, twin="lm_head" if tied else None)
        self.decoder = Decoder(text, at)
        # A quantised or packed head is a matrix of its own: of the table only some rows are read.
        head = table if tied else "lm_head"
        is_packed = at.quantization.kind(head).bits < DENSE_BITS or in_float32.widens(at.empty(0))
        is_shared = tied and not is_packed
        self.head = self.embedding if is_shared else VocabParallelEmbedding(head, *rows, at, is_head=True)
        kv_heads = at.tp.kv_heads(text.num_kv_heads)
        self.state_shape = self.decoder.state_shape
        layers = text.num_layers - (len(self.state_shape.layers) if self.state_shape else 0)
        self.attention_shape = AttentionShape(layers, kv_heads.stop - kv_heads.start, text.head_dim)

    def embed(self, token_ids: Tensor, media: Sequence[MediaRows] = ()) -> Tensor:
        """int `[n]` -> `[n, hidden_size]`, the rows of media in their placeholders' place."""
        hidden = self.embedding(token_ids)
        for first, rows in media:
            hidden[first : first + len(rows)] = rows[:, : hidden.shape[1]]
        return hidden

    def own_patches(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> Sequence[Tensor]:
        """What this rank needs of the patches `[t * h * w, ...]` of each item of a call: all, or a share of them."""
        return self.visual.own_patches(patches, grids) if isinstance(self.visual, SpreadTower) else patches

    def encode_vision(self, patches: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """Encode any number of images (time 1) and videos in one call. Arguments as of `VisionTower.run`, but the
        patches are this rank's `own_patches`.

        Returns:
            Per item `[t * h * w / merge unit, config.vision.row_size]`: views of one tensor. See `MediaRows`.
        """
        unit = self.config.vision.merge_unit
        return list(last_of(self.visual.run(patches, grids)).split([t * h * w // unit for t, h, w in grids]))

    def encode_blocks(self, patches: Tensor, grid: Grid) -> Iterator[Tensor]:
        """`encode_vision` of one item, block by block: an item for each, the last of which are the rows."""
        return self.visual.run(patches, [grid])

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend, media: Sequence[MediaRows] = ()) -> Tensor:
        """Run the decoder over a flat batch: `[n, hidden_size]`, after the final norm.

        Args:
            hidden: `[n, hidden_size]`, from `embed`.
            positions: int64 `[3, n]`, time, height and width; see `rope.mrope_positions`.
            attend: called once per layer, as attention or as `recur`, in order.
            media: as `embed` got them.
        """
        return self.decoder(hidden, positions, attend, media)

    def logits(self, rows: Tensor) -> Tensor | None:
        """`[rows, hidden_size]` -> `[rows, vocab_size]` in the parameters' dtype, on rank 0; None on the others."""
        return self.head.project(rows)

    def logits_of(self, hidden: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
        """`[n, hidden_size]`, int `[k]` and int `[k]` -> float32 `[k]`, of each of the rows the logit of its token, on
        rank 0; what the others get has no meaning. A collective."""
        head = self.embedding if self.config.tie_word_embeddings else self.head  # the table is not quantised
        return head.project_to(hidden, rows, token_ids)

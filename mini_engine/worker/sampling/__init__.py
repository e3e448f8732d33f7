"""Logits to tokens: penalties, grammars in processes of their own, the draw. Knows nothing of sequences and steps."""

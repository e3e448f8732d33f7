"""The bundled model's weights, and the renderer of its videos."""

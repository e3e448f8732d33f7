"""How the bundled model was trained: `python -m training.train`. Only its evaluation knows of the engine."""

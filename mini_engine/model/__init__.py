"""The maths of the models: pure functions of their arguments.

Knows nothing of paging, requests or processes. `config` and `architectures` import no torch, so that any process may
read a model's dimensions; everything else does.
"""

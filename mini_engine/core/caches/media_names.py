"""Media by name: which content a client means by the `uuid` of a part.

A binding has one home, the engine core that all API servers choose by its key alone (`EngineClient.preferred`), so
any of them resolves what another has bound, and none keeps anything. The content itself is elsewhere, or nowhere: this
says what it is, and the media caches say whether they have it. Knows neither names nor clients, only keys.
"""

from collections import OrderedDict
from collections.abc import Iterable

from mini_engine.messages import NamedMedia, NamesResolved

MAX_NAMES = 1 << 16  # of some 400 bytes each


class MediaNames:
    """The bindings of this home, by key: the `MAX_NAMES` that were used last."""

    def __init__(self) -> None:
        self._named: OrderedDict[bytes, NamedMedia] = OrderedDict()

    def resolve(self, request_id: str, keys: Iterable[bytes]) -> NamesResolved:
        """The known ones of these, which are used now."""
        named = {key: self._named[key] for key in keys if key in self._named}
        for key in named:
            self._named.move_to_end(key)
        return NamesResolved(request_id, named)

    def bind(self, key: bytes, media: NamedMedia) -> None:
        """The name with this key means this from now on, whatever it meant before."""
        self._named[key] = media
        self._named.move_to_end(key)
        if len(self._named) > MAX_NAMES:
            self._named.popitem(last=False)

    def reset(self) -> None:
        """Forget all."""
        self._named.clear()

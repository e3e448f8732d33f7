"""A `data:` URL of which the data stay where they arrived."""

from __future__ import annotations


class DataUrl(str):
    """As a text it is what stands before the data, with the comma. The data are `whole[begin:end]`, base64 as a JSON
    string has it: characters may be escaped. It keeps `whole`, which must not change."""

    whole: bytes | bytearray
    begin: int
    end: int

    def __new__(cls, head: str, whole: bytes | bytearray, begin: int, end: int) -> DataUrl:
        url = super().__new__(cls, head)
        url.whole, url.begin, url.end = whole, begin, end
        return url

    @property
    def data(self) -> memoryview:
        """The data, as they arrived."""
        return memoryview(self.whole)[self.begin : self.end]

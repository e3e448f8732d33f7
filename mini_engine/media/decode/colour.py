"""The colours of HDR and wide-gamut RGB -> sRGB, in place. Knows nothing of files or frames.

FFmpeg's own conversion, its filter `scale` with transfers and primaries, first takes seconds of processor time in a
thread for each core, in each process and for each size of frame. Tables take none, and no more for a frame.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

# Primaries, transfers and matrices have the numbers of ITU-T H.273, tables 2 to 4.
UNKNOWN, BT2020, PQ, HLG = 2, 9, 16, 18
_TO_BT709 = np.array(((1.6605, -0.5876, -0.0728), (-0.1246, 1.1329, -0.0083), (-0.0182, -0.1006, 1.1187)), np.float32).T

_WHITE = 203  # nits of HDR's reference white (ITU-R BT.2408), which stays nearly white
_PEAK = 1000 / _WHITE  # the brightest light that differs from white
_KNEE = 0.7  # linear sRGB, from which brightness is compressed
_BT2020_LUMA = np.array([0.2627, 0.6780, 0.0593], np.float32)
_STEPS = 4095
_STRIP_ROWS = 16  # at once: what they take fits a processor's cache


def to_srgb(pixels: NDArray[np.uint8], primaries: int, transfer: int) -> None:
    """Converts uint8 [H, W, 3] whose transfer is PQ or HLG, or whose primaries are BT.2020. Others stay. HDR is taken
    for BT.2020, and shown as a display of 1000 nits shows it (ITU-R BT.2100), relative to `_WHITE`. SDR is taken for
    sRGB in all but the primaries, as it is where these are BT.709."""
    is_hdr = transfer in (PQ, HLG)
    if not is_hdr and primaries != BT2020:
        return
    peak = _PEAK if is_hdr else 1.0
    linear, encoded = _linear(transfer), _encoded(peak)
    for top in range(0, len(pixels), _STRIP_ROWS):
        strip = pixels[top : top + _STRIP_ROWS]
        light = linear[strip]
        if transfer == HLG:
            light *= (light @ _BT2020_LUMA)[..., None] ** np.float32(0.2) * np.float32(_PEAK)
        light = np.sqrt((light @ _TO_BT709).clip(0, peak)) * np.float32(_STEPS / peak**0.5)
        strip[...] = encoded[light.astype(np.uint16)]


@cache
def _linear(transfer: int) -> NDArray[np.float32]:
    """Light of each signal, float32 [256]. 1 is white, but of HLG the brightest light of the scene."""
    signal = np.linspace(0, 1, 256)
    if transfer == PQ:  # SMPTE ST 2084
        root = signal ** (32 / 2523)
        light = (np.maximum(root - 0.8359375, 0) / (18.8515625 - 18.6875 * root)) ** (8192 / 1305) * (10000 / _WHITE)
    elif transfer == HLG:  # ARIB STD-B67
        light = np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - 0.55991073) / 0.17883277) + 0.28466892) / 12)
    else:
        light = np.where(signal <= 0.04045, signal / 12.92, ((signal + 0.055) / 1.055) ** 2.4)
    return light.astype(np.float32)


@cache
def _encoded(peak: float) -> NDArray[np.uint8]:
    """sRGB of the light (index / _STEPS)**2 * peak, uint8. Above the knee `peak` becomes 1, with a slope of 1 at the
    knee (Reinhard et al. 2002, equation 4); a peak of 1 changes nothing."""
    light = np.linspace(0, 1, _STEPS + 1) ** 2 * peak
    above, brightest = np.maximum(light - _KNEE, 0) / (1 - _KNEE), (peak - _KNEE) / (1 - _KNEE)
    light = np.minimum(light, _KNEE) + (1 - _KNEE) * above * (1 + above / brightest**2) / (1 + above)
    srgb = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    return (255 * srgb).round().clip(0, 255).astype(np.uint8)


# OpenBLAS takes memory at its first product, and ends the process where it gets none: so before a job has a limit.
to_srgb(np.zeros((_STRIP_ROWS, 1024, 3), np.uint8), BT2020, HLG)

"""Which transformers may be asked for what."""

import pytest
import transformers
from packaging.version import Version

# Releases before 5.23 cut the seconds of a temporal patch to an integer. This project does not, like the later ones and
# like the code the models were trained with: there an earlier release is no oracle for videos with other frame rates.
CUTS_SECONDS = Version(transformers.__version__) < Version("5.23")

exact_seconds = pytest.mark.skipif(CUTS_SECONDS, reason="this transformers cuts the seconds of a temporal patch")

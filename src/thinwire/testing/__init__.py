"""The laws that every compressor keeps, as functions: a compressor of another package can be tested by them, too.

import pytest
from thinwire.testing import LAWS

@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law):
    law(MyCompressor(bits=3))
"""

from thinwire.testing.laws import LAWS as LAWS

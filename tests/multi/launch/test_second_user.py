"""Another user of this machine attacks a live run: tests/campaigns/second_user.py."""

import tempfile
from pathlib import Path

import pytest
import second_user
from disks import needs_root

pytestmark = pytest.mark.long
SHARE = 6
"""A sixth of the attacks of the campaign, another one in each run."""


@needs_root
@pytest.mark.timeout(1800)
def test_attacks_of_another_user_fail() -> None:
    # Not pytest's directory, which the other user cannot enter.
    with tempfile.TemporaryDirectory(prefix="second-user-") as name:
        results, is_held = second_user.campaign(Path(name), SHARE)
    assert is_held and len(results) >= 40 // SHARE, results

"""Every reason for which a device declines has a sentence for its log and a remedy on the page."""

import pytest

from coordinator.facts.problems import REMEDIES
from fedcg.sentences import DECLINE_ADVICE
from fedcg.wire.messages.schemas import DeclineReason


@pytest.mark.parametrize("reason", DeclineReason)
def test_a_person_reads_what_to_do_about_a_reason(reason: DeclineReason) -> None:
    assert DECLINE_ADVICE[reason.value]
    assert all(REMEDIES[reason.value])

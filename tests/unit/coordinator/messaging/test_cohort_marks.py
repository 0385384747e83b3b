"""Which devices of a cohort have another secret than the others."""

from coordinator.messaging.incoming import Cohorts
from fedcg.wire.messages.schemas import CohortVerdict


def test_a_cohort_is_compared_without_a_device_that_is_gone() -> None:
    cohorts = Cohorts()
    cohorts.note("a", "1" * 32)
    cohorts.note("b", "1" * 32)
    assert cohorts.note("odd", "2" * 32) == ("a", "b")
    assert cohorts.verdict("a") is CohortVerdict.DIFFERENT
    cohorts.forget("odd")
    assert cohorts.verdict("a") is CohortVerdict.SAME
    cohorts.forget("b")
    assert cohorts.verdict("a") is CohortVerdict.ALONE

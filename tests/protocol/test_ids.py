"""Identities: how they are printed, and read again."""

import pytest

from repertory.protocol.ids import RequestId, incarnation_of, parse_request_id, request_ids, show_request_id


@pytest.mark.parametrize(
    ("request_id", "shown"),
    [(RequestId(0x4C8E288B << 32 | 17), "4c8e288b-17"), (RequestId(7 << 32 | 5), "00000007-5"), (RequestId(3), "00000000-3")],
)
def test_a_request_id_is_printed_as_its_frontend_and_its_number_and_read_from_that(request_id: RequestId, shown: str) -> None:
    assert show_request_id(request_id) == shown
    assert parse_request_id(shown) == request_id


def test_a_new_id_survives_being_printed_with_its_highest_and_lowest_bits() -> None:
    highest = RequestId(2**63 - 1)
    for request_id in (request_ids()(), request_ids(2**31 - 1)(), highest):
        found = parse_request_id(show_request_id(request_id))
        assert (found, incarnation_of(found)) == (request_id, incarnation_of(request_id))


@pytest.mark.parametrize("shown", ["", "what", "-", "4c8e288b", "4c8e288b-", "-5", "4c8e288g-5", "4c8e288b-a", "4c8e288b-1-2"])
def test_what_is_no_request_id_is_refused(shown: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_request_id(shown)

"""The token's text, and what is signed at the first contact."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcg.wire.errors import MalformedError
from fedcg.wire.messages import enrolment_messages

HEX = st.integers(min_value=0, max_value=2**256 - 1).map(lambda number: f"{number:064x}")
TOKENS = st.fixed_dictionaries(
    {
        "id": st.integers(min_value=0, max_value=2**64 - 1).map(lambda number: f"{number:016x}"),
        "secret": st.binary(min_size=32, max_size=32),
        "authority": HEX,
        "coordinator": HEX,
        "url": st.none() | st.just("https://broker.example:8444"),
        "device": st.none() | st.just("line-4"),
    }
).map(enrolment_messages.Token.model_validate)


@given(TOKENS)
def test_a_token_is_read_back_as_it_was_written_also_with_white_space_around(token: enrolment_messages.Token) -> None:
    assert enrolment_messages.Token.parse(f"  {token.text}\n") == token
    assert token.text.isascii()
    assert " " not in token.text


@given(TOKENS, st.data())
def test_a_mistyped_or_cut_token_is_noticed_at_once(token: enrolment_messages.Token, data: st.DataObject) -> None:
    at = data.draw(st.integers(min_value=5, max_value=len(token.text) - 2))
    other = "A" if token.text[at] != "A" else "B"
    for damaged in (token.text[:at] + other + token.text[at + 1 :], token.text[:at]):
        with pytest.raises(MalformedError, match="cut off or mistyped"):
            enrolment_messages.Token.parse(damaged)


def test_what_is_no_token_is_told_without_repeating_it() -> None:
    for text in ("", "secret-looking", "fcg1", "x" * 5000):
        with pytest.raises(MalformedError, match="not an enrolment token") as refused:
            enrolment_messages.Token.parse(text)
        assert "secret-looking" not in str(refused.value)


@pytest.mark.parametrize("port", ["", ":1", ":443", ":8444", ":65535", ":0", ":65536", ":99999", ":08444", ":"])
def test_a_url_has_a_port_of_1_to_65535_or_none(port: str) -> None:
    is_one = port in ("", ":1", ":443", ":8444", ":65535")
    for host in ("broker.example", "127.0.0.1", "[2001:db8::1]"):
        assert bool(re.fullmatch(enrolment_messages.URL_PATTERN, f"https://{host}{port}")) is is_one


def test_a_secret_is_in_no_text_that_is_made_for_people() -> None:
    token = enrolment_messages.Token(id="0" * 16, secret=b"s" * 32, authority="a" * 64, coordinator="c" * 64)
    assert token.secret.hex() not in repr(token)
    assert "sss" not in repr(token)
    request = enrolment_messages.EnrolRequest(
        token="0" * 16, secret="5" * 64, device="a", request="x", signing_key="1" * 64, proof="2" * 128, nonce="3" * 32
    )
    assert "5" * 64 not in repr(request)


def test_what_is_signed_holds_token_device_and_both_keys_and_no_statement_is_another() -> None:
    statements = {
        enrolment_messages.enrolment_statement("t", "d", "k", "s"),
        enrolment_messages.enrolment_statement("u", "d", "k", "s"),
        enrolment_messages.enrolment_statement("t", "e", "k", "s"),
        enrolment_messages.enrolment_statement("t", "d", "l", "s"),
        enrolment_messages.enrolment_statement("t", "d", "k", "r"),
        enrolment_messages.enrolment_statement("td", "", "k", "s"),
        enrolment_messages.renewal_statement("d", "k"),
        enrolment_messages.renewal_statement("d", "l"),
    }
    assert len(statements) == 8

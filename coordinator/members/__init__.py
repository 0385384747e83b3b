"""Tokens, enrolment, revocation."""

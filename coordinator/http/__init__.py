"""The operator API and the listeners for enrolment and transfers."""

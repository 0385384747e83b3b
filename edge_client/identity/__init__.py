"""The identity of this device: keys, certificates, enrolment, renewal, leaving."""

"""Who this box is: keys, certificates, enrolment, renewal, leaving."""

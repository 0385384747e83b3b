"""Who this device is: keys, certificates, enrolment, renewal, leaving."""

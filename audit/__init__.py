"""What left a box: an independent observer of the wire and checks of its recording."""

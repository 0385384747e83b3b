"""An independent observer of the wire, and checks of its recording."""

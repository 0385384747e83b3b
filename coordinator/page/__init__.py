"""The page for people: what the facts hold as HTML, and forms that steer. Every screen is a URL that also works without script."""

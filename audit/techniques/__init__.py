"""What attacks are made of: closed forms, searches, shadow models, class shares. They take a view or a gradient, never the truth."""

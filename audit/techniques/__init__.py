"""Building blocks of attacks: closed forms, searches, shadow models, class shares. They take a view or a gradient, never the truth."""
